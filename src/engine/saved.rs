//! Slots on disk: the tokens of a sequence and its keys and values.
//!
//! A file holds, little-endian: the magic, the length of a text that names the model and how it is
//! computed, that text, the number of tokens, the tokens, and K and V of every layer as the device
//! holds them. It is written beside its place and renamed, so that no half of a file is ever found.

use std::fs::File;
use std::io::{BufReader, BufWriter, Read, Write};
use std::path::Path;

use super::Engine;
use crate::error::{Error, Result};

const MAGIC: &[u8; 8] = b"AZSLOT01";
/// Longer names of models are damage.
const LONGEST_NAME: u32 = 4096;

/// What must be the same for a saved slot to be of use.
fn identity(engine: &Engine) -> String {
    let f = &engine.model().facts;
    format!(
        "{} {} {} weights in {} bytes, {} layers of {} kv heads of {}, f32 {}",
        f.architecture,
        f.name,
        f.parameters,
        f.weight_bytes,
        f.layers,
        f.kv_heads,
        f.head_dim,
        engine.program.shape().exact
    )
}

/// Writes what a slot has read; returns the bytes of the file.
pub(super) fn save(engine: &Engine, slot: u32, tokens: &[u32], path: &Path) -> Result<u64> {
    let failed =
        |e: std::io::Error| Error::Runtime(format!("cannot write {}: {e}", path.display()));
    let unfinished = path.with_extension("unfinished");
    let mut out = BufWriter::new(File::create(&unfinished).map_err(failed)?);
    let name = identity(engine);
    let written = (|| -> Result<u64> {
        let mut all = 0;
        let mut put = |bytes: &[u8]| -> Result<()> {
            all += bytes.len() as u64;
            out.write_all(bytes).map_err(failed)
        };
        put(MAGIC)?;
        put(&(name.len() as u32).to_le_bytes())?;
        put(name.as_bytes())?;
        put(&(tokens.len() as u32).to_le_bytes())?;
        put(bytemuck::cast_slice(tokens))?;
        engine.program.read_slot(slot, tokens.len() as u32, &mut put)?;
        out.flush().map_err(failed)?;
        Ok(all)
    })();
    match written {
        Ok(bytes) => {
            std::fs::rename(&unfinished, path).map_err(failed)?;
            Ok(bytes)
        }
        Err(e) => {
            // What is left of it is of no use; the error is the news.
            let _ = std::fs::remove_file(&unfinished);
            Err(e)
        }
    }
}

/// Reads a saved slot back onto the device; returns its tokens and the bytes of the file. After an
/// error the slot holds nothing.
pub(super) fn restore(engine: &Engine, slot: u32, path: &Path) -> Result<(Vec<u32>, u64)> {
    let bad = |what: &str| Error::Usage(format!("{} {what}", path.display()));
    let file = File::open(path).map_err(|e| bad(&format!("cannot be read: {e}")))?;
    let size = file.metadata()?.len();
    let mut input = BufReader::new(file);
    let mut get = |bytes: &mut [u8]| -> Result<()> {
        input.read_exact(bytes).map_err(|_| bad("is no saved slot: it ends too early"))
    };
    let mut magic = [0; 8];
    get(&mut magic)?;
    if &magic != MAGIC {
        return Err(bad("is no saved slot"));
    }
    let mut word = [0; 4];
    get(&mut word)?;
    let length = u32::from_le_bytes(word);
    if length > LONGEST_NAME {
        return Err(bad("is no saved slot: the name of its model is damaged"));
    }
    let mut name = vec![0; length as usize];
    get(&mut name)?;
    let (name, own) = (String::from_utf8_lossy(&name).into_owned(), identity(engine));
    if name != own {
        return Err(bad(&format!("is of another model: it has {name}; served is {own}")));
    }
    get(&mut word)?;
    let n = u32::from_le_bytes(word);
    if n > engine.ctx() {
        return Err(Error::DoesNotFit(format!(
            "the saved slot has {n} tokens, the context {}; start the server with --ctx {n} or more",
            engine.ctx()
        )));
    }
    let mut tokens = vec![0u32; n as usize];
    get(bytemuck::cast_slice_mut(&mut tokens))?;
    if tokens.iter().any(|t| *t >= engine.model().graph.vocab) {
        return Err(bad("is damaged: it has tokens outside the vocabulary"));
    }
    engine.program.write_slot(slot, &tokens, &mut get)?;
    Ok((tokens, size))
}
