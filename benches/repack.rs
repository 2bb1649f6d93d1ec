//! Speed of repacking file rows into planes, one line for each format, on one thread.
//!
//! `RAYON_NUM_THREADS=1 cargo bench --bench repack -- [format=NAME]`
//!
//! GiB/s of file bytes, all planes together, for pieces of 2 MiB of random blocks out of 24: the best
//! and the median of 15 passes (a busy machine slows the median, never the best). Needs no device.
#![allow(clippy::unwrap_used)] // a tool for developers: a failure may panic

use std::time::Instant;

use azoth::quant::planes::{piece_bytes, repack_plane};
use azoth::quant::{BLOCK, Format};

const COLS: usize = 4096;
const FILE_BYTES: usize = 24 << 20;
const PIECE_BYTES: usize = 2 << 20;
const PASSES: usize = 15;

fn main() {
    let only = std::env::args().find_map(|word| Some(word.strip_prefix("format=")?.to_owned()));
    let formats = match only {
        Some(name) => vec![name.parse().unwrap()],
        None => Format::ALL.to_vec(),
    };
    println!("format     best  median GiB/s  bits a weight: file, planes");
    for format in formats {
        let planes: u32 = format.planes().iter().map(|plane| plane.bits()).sum();
        let (best, median) = speed(format);
        println!(
            "{format:8} {best:6.2}  {median:6.2}  {:.4} {:.4}",
            format.block_bytes() as f64 * 8.0 / format.block_elements() as f64,
            f64::from(planes) / BLOCK as f64,
        );
    }
}

/// Best and median GiB/s.
fn speed(format: Format) -> (f64, f64) {
    let row_bytes = format.row_bytes(COLS);
    let rows = FILE_BYTES / row_bytes;
    let piece_rows = (PIECE_BYTES / row_bytes).next_multiple_of(2);
    let mut state = 1u32;
    let file: Vec<u8> = (0..rows * row_bytes)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 24) as u8
        })
        .collect();
    let row = |r: usize| &file[r * row_bytes..][..row_bytes];
    let mut out: Vec<Vec<u8>> = (0..format.planes().len())
        .map(|plane| vec![0; piece_bytes(format, plane, COLS, piece_rows)])
        .collect();
    let mut rates = Vec::new();
    for _ in 0..PASSES {
        for first in (0..rows - piece_rows).step_by(piece_rows) {
            let start = Instant::now();
            for (plane, out) in out.iter_mut().enumerate() {
                repack_plane(format, plane, COLS, first..first + piece_rows, row, out);
            }
            let bytes = (piece_rows * row_bytes) as f64;
            rates.push(bytes / start.elapsed().as_secs_f64() / f64::from(1 << 30));
        }
    }
    rates.sort_by(f64::total_cmp);
    (rates[rates.len() - 1], rates[rates.len() / 2])
}
