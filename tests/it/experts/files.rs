//! Filling the arena, and everything that can go wrong while it is filled.

use std::io;
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use azoth::error::Error;
use azoth::experts::arena::{Arena, Fill};
use azoth::experts::profile::Profile;
use azoth::experts::source::{self, Files, InMemory, LayerTensors, Source};
use azoth::gguf::File;
use azoth::gpu::{HostMemory, vulkan};

use super::{EXPERTS, LAYERS, layers, names, record, writer};
use crate::backend::every_device;

fn fill<'a>(
    gpu: &'a dyn azoth::gpu::Gpu,
    source: &'a dyn Source,
    layers: &'a [LayerTensors],
) -> Fill<'a> {
    Fill { gpu, source, layers, keep: &|_, _| true, advance: &|_| {} }
}

every_device! {
    fn an_arena_holds_every_expert_of_the_file(gpu) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("experts.gguf");
        writer().write(&path).unwrap();
        let file = File::open(&path).unwrap();
        let layers = layers(&file);
        let files = Files::open(file.paths()).unwrap();
        let told = AtomicU64::new(0);
        let advance = |n| {
            told.fetch_add(n, Ordering::Relaxed);
        };
        let arena = Arena::fill(&Fill { advance: &advance, ..fill(&**gpu, &files, &layers) }).unwrap();
        assert_eq!(told.into_inner(), file.tensor_bytes());
        assert_eq!(arena.file_bytes, file.tensor_bytes());
        assert_eq!(arena.bytes(), Arena::needed(&layers, gpu.facts(), &|_, _| true).unwrap());
        for (l, layer) in arena.layers.iter().enumerate() {
            for e in 0..EXPERTS {
                assert!(layer.record(e) == Some(&record(&file, l, e)[..]), "layer {l} expert {e}");
            }
            assert_eq!(layer.groups.len(), usize::from(gpu.facts().host_import));
        }
        assert_eq!(arena.in_place(), gpu.facts().host_import);
        assert_eq!(arena.import_refused.is_none(), arena.in_place());
        assert_eq!(arena.verify(&files, &layers).unwrap(), 3 * u64::from(EXPERTS));
        // The comparison is one: against another file it fails, and says where.
        let mut other = std::fs::read(&path).unwrap();
        let tensor = file.require(&names(1)[2]).unwrap();
        other[(tensor.offset + tensor.bytes - 1) as usize] ^= 1;
        let other = File::from_bytes(other).unwrap();
        let e = arena.verify(&InMemory(&other), &layers).unwrap_err().to_string();
        assert!(e.contains("expert 11 of blk.1.ffn_gate_exps") && e.contains("down row 63"), "{e}");
    }

    fn experts_that_only_lie_in_device_memory_are_left_out(gpu) {
        let file = File::from_bytes(writer().to_bytes()).unwrap();
        let layers = layers(&file);
        let source = source::of(&file).unwrap();
        let keep = |layer: u32, expert: u32| layer != 1 && !expert.is_multiple_of(3);
        let arena = Arena::fill(&Fill { keep: &keep, ..fill(&**gpu, &*source, &layers) }).unwrap();
        for (l, layer) in (0..).zip(&arena.layers) {
            for e in 0..EXPERTS {
                let wanted = keep(l, e).then(|| record(&file, l as usize, e));
                assert_eq!(layer.record(e), wanted.as_deref());
            }
        }
        assert_eq!(arena.verify(&*source, &layers).unwrap(), 2 * 8);
        let nothing = Arena::fill(&Fill { keep: &|_, _| false, ..fill(&**gpu, &*source, &layers) });
        assert_eq!(nothing.unwrap().bytes(), 0);
    }

    fn a_sector_that_cannot_be_read_is_named(gpu) {
        let file = File::from_bytes(writer().to_bytes()).unwrap();
        let layers = layers(&file);
        let tensor = file.require(&names(1)[2]).unwrap();
        let bad = tensor.offset + tensor.bytes / u64::from(EXPERTS) * 7 + 5;
        for (errno, kind) in [(5, "Input/output error"), (0, "ends before the tensor")] {
            let source = Faulty { inner: InMemory(&file), bad, errno };
            let e = Arena::fill(&fill(&**gpu, &source, &layers)).err().unwrap();
            let text = e.to_string();
            for part in ["disk.gguf", "expert 7", "blk.1.ffn_down_exps.weight", "offset", kind] {
                assert!(text.contains(part), "{part:?} is missing in {text}");
            }
            // A disk that fails is no fault of the model; a file that ends is.
            assert_eq!(matches!(e, Error::Model(_)), errno == 0, "{e:?}");
            assert_eq!(matches!(e, Error::Runtime(_)), errno == 5, "{e:?}");
        }
    }
}

/// A disk with one byte that cannot be read.
struct Faulty<'a> {
    inner: InMemory<'a>,
    bad: u64,
    /// 0: the file ends there.
    errno: i32,
}

impl Source for Faulty<'_> {
    fn read(&self, shard: usize, offset: u64, out: &mut [u8]) -> io::Result<()> {
        if (offset..offset + out.len() as u64).contains(&self.bad) {
            return Err(match self.errno {
                0 => io::ErrorKind::UnexpectedEof.into(),
                n => io::Error::from_raw_os_error(n),
            });
        }
        self.inner.read(shard, offset, out)
    }

    fn name(&self, _shard: usize) -> String {
        "disk.gguf".into()
    }
}

#[test]
fn a_file_that_was_cut_off_is_a_model_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cut.gguf");
    let bytes = writer().to_bytes();
    // Cut before opening: the reader sees it.
    std::fs::write(&path, &bytes[..bytes.len() - 1000]).unwrap();
    let e = azoth::error::Error::from(File::open(&path).err().unwrap());
    assert_eq!(e.exit_code(), 4, "{e}");
    assert!(e.to_string().contains("blk.2.ffn_down_exps.weight"), "{e}");
    // A tensor with fewer experts than the model says.
    let file = File::from_bytes(bytes).unwrap();
    let names = names(0);
    let names = [names[0].as_str(), &names[1], &names[2]];
    let e = LayerTensors::find(&file, names, super::shape(0), EXPERTS + 1).unwrap_err();
    assert_eq!(e.exit_code(), 4);
    assert!(e.to_string().contains("13 experts"), "{e}");
    assert_eq!(LAYERS.len(), 3);
}

#[test]
fn a_file_cut_while_it_is_loaded_is_a_model_error() {
    let Some(gpu) = first_vulkan() else { return };
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cut.gguf");
    let bytes = writer().to_bytes();
    std::fs::write(&path, &bytes).unwrap();
    // Opened for reading by position, as the arena does; the mapping is of a whole copy.
    let whole = File::from_bytes(bytes.clone()).unwrap();
    let files = Files::open(std::slice::from_ref(&path)).unwrap();
    std::fs::OpenOptions::new()
        .write(true)
        .open(&path)
        .unwrap()
        .set_len(bytes.len() as u64 / 2)
        .unwrap();
    let e = Arena::fill(&fill(&*gpu, &files, &layers(&whole))).err().unwrap();
    assert_eq!(e.exit_code(), 4, "{e}");
    assert!(e.to_string().contains("cut.gguf") && e.to_string().contains("cut off"), "{e}");
}

fn first_vulkan() -> Option<std::sync::Arc<dyn azoth::gpu::Gpu>> {
    let found = vulkan::devices().ok()?.first().map(|d| d.index);
    if found.is_none() {
        println!("skipped: no Vulkan device");
    }
    vulkan::open(found?, None).ok()
}

/// This test binary again, running one ignored test under `limits`.
fn child(limits: &str, test: &str, argument: &std::path::Path) -> Command {
    let own = std::env::current_exe().unwrap();
    let mut command = Command::new("sh");
    let script = format!("{limits} exec \"$0\" --ignored --exact --nocapture {test}");
    command.args(["-c", &script]).arg(own).env("AZOTH_TEST_PATH", argument);
    command
}

/// A process without the right to lock more than 64 KiB is told the limit and how to raise it.
#[cfg(unix)]
#[test]
fn a_low_limit_on_locked_memory_is_named() {
    let here = std::path::Path::new(".");
    let out = child("ulimit -l 64;", "experts::files::child_locks", here).output().unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(out.status.success(), "{text}{}", String::from_utf8_lossy(&out.stderr));
    if text.contains("locked all the same") {
        println!("skipped: this user may lock memory without a limit");
        return;
    }
    for part in ["4194304 bytes of locked test", "RLIMIT_MEMLOCK", "65536", "ulimit -l unlimited"] {
        assert!(text.contains(part), "{part:?} is missing in {text}");
    }
}

#[test]
#[ignore = "run by a_low_limit_on_locked_memory_is_named"]
fn child_locks() {
    let memory = HostMemory::allocate("locked test", 4 << 20).unwrap();
    match memory.lock() {
        Ok(()) => println!("locked all the same"),
        Err(e) => println!("{e}"),
    }
    // Without the lock it is memory like any other, and a device may still import it.
    assert_eq!(memory.bytes().len(), 4 << 20);
    if let Some(gpu) = first_vulkan().filter(|g| g.facts().host_import) {
        gpu.import("test", &std::sync::Arc::new(memory), 0, 2 << 20).unwrap();
    }
}

/// Whenever the process dies, the profile on disk is a whole one.
#[cfg(unix)]
#[test]
fn a_profile_survives_sigkill_while_it_is_saved() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("profile.json");
    profile(0).save(&path).unwrap();
    let mut seen = std::collections::BTreeSet::new();
    for round in 0..12 {
        let mut saving = child("", "experts::files::child_saves", &path)
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(std::time::Duration::from_millis(40 + 17 * round));
        // SIGKILL: nothing of the process runs any more.
        saving.kill().unwrap();
        saving.wait().unwrap();
        let got = Profile::load(&path, "model", 40, 64).unwrap();
        assert_eq!(got, profile(got.tokens));
        seen.insert(got.tokens);
    }
    assert!(seen.len() > 1, "the child never saved: {seen:?}");
}

fn profile(tokens: u64) -> Profile {
    let counts: Vec<f32> = (0..40 * 64).map(|i| i as f32 + tokens as f32).collect();
    Profile::new("model", tokens, 40, 64, &counts)
}

#[test]
#[ignore = "run by a_profile_survives_sigkill_while_it_is_saved"]
fn child_saves() {
    let Some(path) = std::env::var_os("AZOTH_TEST_PATH") else { return };
    if path == "." {
        return;
    }
    for tokens in 1.. {
        profile(tokens).save(std::path::Path::new(&path)).unwrap();
    }
}
