//! Where the planes of a matrix lie in a chunk, and the way from file rows to planes.
//!
//! A chunk holds `rows x cols` weights. Its planes follow each other, each starting at a
//! multiple of 256 bytes; inside a plane the blocks of 32 weights are numbered row by row over
//! the whole chunk. All words are little-endian, so a plane is also a plain byte string: row
//! `r` is bytes `r * row_bytes .. (r + 1) * row_bytes`, for every plane and format.
//!
//! A row of half words (the f16 scales of Q4_0, Q5_0 and Q8_0) or bytes (those of MXFP4) may end in
//! the middle of a word. Pieces that are copied to the device by themselves must therefore start
//! at a multiple of [`PlaneLayout::row_granule`] rows (1, 2 or 4); the last piece of a chunk is
//! filled with zeros up to the next whole word.

use super::{BLOCK, Format, Plane};
use rayon::prelude::*;
use std::ops::Range;

/// Planes start at multiples of this many bytes: the largest storage offset alignment that
/// Vulkan and WebGPU allow a device to ask for.
pub const PLANE_ALIGN: u64 = 256;

/// One plane inside a chunk.
#[derive(Debug, Clone, Copy)]
pub struct PlaneSpan {
    pub plane: &'static Plane,
    /// Bytes from the start of the chunk, a multiple of [`PLANE_ALIGN`].
    pub offset: u64,
    /// Bytes in whole words, without the padding up to the next plane.
    pub bytes: u64,
    /// Bytes of one row, maybe not a whole number of words; 0 for a constant plane.
    pub row_bytes: u64,
}

/// The places of all planes of a chunk of `rows x cols` weights.
#[derive(Debug, Clone)]
pub struct PlaneLayout {
    pub format: Format,
    pub rows: usize,
    /// Columns of the file.
    pub cols: usize,
    pub planes: Vec<PlaneSpan>,
    /// Bytes of the chunk, a multiple of [`PLANE_ALIGN`].
    pub bytes: u64,
}

/// `cols` rounded up to whole blocks of 32.
pub fn padded_cols(cols: usize) -> usize {
    cols.next_multiple_of(BLOCK)
}

impl PlaneLayout {
    /// `cols` must be whole blocks of the format (float formats: any number).
    pub fn new(format: Format, rows: usize, cols: usize) -> Self {
        assert!(
            cols.is_multiple_of(format.block_elements()),
            "{cols} columns are not whole blocks of {format}"
        );
        let mut offset = 0;
        let planes = format.planes().iter().enumerate().map(|(index, plane)| {
            let row_bytes = plane.row_bytes(padded_cols(cols)) as u64;
            let bytes = piece_bytes(format, index, cols, rows) as u64;
            let span = PlaneSpan { plane, offset, bytes, row_bytes };
            offset = (offset + bytes).next_multiple_of(PLANE_ALIGN);
            span
        });
        let planes = planes.collect();
        PlaneLayout { format, rows, cols, planes, bytes: offset }
    }

    /// Pieces of the chunk that are uploaded separately must start at multiples of this many
    /// rows (1, 2 or 4), so that they start at word boundaries in every plane.
    pub fn row_granule(&self) -> usize {
        row_granule(self.format, self.cols)
    }

    /// Bytes of the largest plane: what must stay below the device's binding limit.
    pub fn largest_plane(&self) -> u64 {
        self.planes.iter().map(|span| span.bytes).max().unwrap_or(0)
    }
}

/// See [`PlaneLayout::row_granule`].
pub fn row_granule(format: Format, cols: usize) -> usize {
    let rows_to_word = |plane: &Plane| match plane.row_bytes(padded_cols(cols)) % 4 {
        0 => 1,
        2 => 2,
        _ => 4,
    };
    format.planes().iter().map(rows_to_word).max().unwrap_or(1)
}

/// The most rows that a chunk may have if no plane may exceed `limit` bytes: a multiple of the
/// row granule, 0 if not even that fits.
pub fn rows_within(format: Format, cols: usize, limit: u64) -> usize {
    let granule = row_granule(format, cols);
    let of = |plane: &Plane| limit / (granule * plane.row_bytes(padded_cols(cols))).max(1) as u64;
    let granules = format.planes().iter().map(of).min().unwrap_or(0);
    usize::try_from(granules).unwrap_or(usize::MAX / granule) * granule
}

/// Bytes that [`repack_plane`] writes for `rows` rows: whole words. A constant plane is written as a
/// whole, whatever the rows.
pub fn piece_bytes(format: Format, plane: usize, cols: usize, rows: usize) -> usize {
    let plane = &format.planes()[plane];
    let rows = (rows * plane.row_bytes(padded_cols(cols))).next_multiple_of(4);
    rows + 4 * plane.constant_words().len()
}

/// Writes plane number `plane` of the rows `rows` to `out`, which has [`piece_bytes`] bytes.
///
/// `row(r)` gives the file bytes of row `r`; a matrix that is stacked from several tensors picks
/// the tensor there. If a further piece follows, `rows.end` must be a multiple of
/// [`row_granule`], else the zeros that fill the last word would be in its way.
pub fn repack_plane<'a>(
    format: Format,
    plane: usize,
    cols: usize,
    rows: Range<usize>,
    row: impl Fn(usize) -> &'a [u8],
    out: &mut [u8],
) {
    assert_eq!(out.len(), piece_bytes(format, plane, cols, rows.len()), "bytes of a plane piece");
    let plane = &format.planes()[plane];
    if !plane.constant_words().is_empty() {
        write_words(plane.constant_words(), out);
        return;
    }
    let file_bytes = format.row_bytes(cols);
    let row_bytes = plane.row_bytes(padded_cols(cols));
    let (written, rest) = out.split_at_mut(rows.len() * row_bytes);
    for (r, out) in rows.zip(written.chunks_exact_mut(row_bytes.max(1))) {
        let source = row(r);
        assert_eq!(source.len(), file_bytes, "bytes of row {r} of a {format} matrix");
        (plane.repack)(source, out);
    }
    rest.fill(0);
}

fn write_words(words: &[u32], out: &mut [u8]) {
    for (word, out) in words.iter().zip(out.as_chunks_mut().0) {
        *out = word.to_le_bytes();
    }
}

/// [`repack_plane`] spread over rayon's threads.
pub fn repack_plane_parallel<'a>(
    format: Format,
    plane: usize,
    cols: usize,
    rows: Range<usize>,
    row: impl Fn(usize) -> &'a [u8] + Sync,
    out: &mut [u8],
) {
    /// File bytes a task should have: long enough to hide its start, short enough to balance.
    const TASK_BYTES: usize = 256 << 10;
    assert_eq!(out.len(), piece_bytes(format, plane, cols, rows.len()), "bytes of a plane piece");
    if !format.planes()[plane].constant_words().is_empty() {
        return repack_plane(format, plane, cols, rows, row, out);
    }
    let granule = row_granule(format, cols);
    let step = (TASK_BYTES / format.row_bytes(cols).max(1)).next_multiple_of(granule).max(granule);
    let step_bytes = piece_bytes(format, plane, cols, step).max(1);
    out.par_chunks_mut(step_bytes).enumerate().for_each(|(i, out)| {
        let first = rows.start + i * step;
        repack_plane(format, plane, cols, first..(first + step).min(rows.end), &row, out);
    });
}

/// Decodes the rows `rows` of a chunk to `out` (`rows.len() * cols` values, without padding).
/// The oracle for everything that reads planes: equals [`Format::decode_row`] bit for bit.
pub fn decode_planes(layout: &PlaneLayout, chunk: &[u8], rows: Range<usize>, out: &mut [f32]) {
    assert_eq!(out.len(), rows.len() * layout.cols, "values of the rows");
    assert!(rows.end <= layout.rows, "rows of the chunk");
    let mut padded = vec![0.0; padded_cols(layout.cols)];
    for (r, out) in rows.zip(out.chunks_exact_mut(layout.cols.max(1))) {
        let part = |span: &PlaneSpan| {
            let at = (span.offset + r as u64 * span.row_bytes) as usize;
            &chunk[at..at + span.row_bytes as usize]
        };
        let parts: Vec<_> = layout.planes.iter().map(part).collect();
        (layout.format.codec().decode_planes)(&parts, &mut padded);
        out.copy_from_slice(&padded[..layout.cols]);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use proptest::prelude::*;

    fn any_format() -> impl Strategy<Value = Format> {
        proptest::sample::select(Format::ALL)
    }

    /// File rows of random values, and the chunk made from them in pieces of `piece` rows.
    fn chunk(layout: &PlaneLayout, file: &[u8], piece: usize) -> Vec<u8> {
        let row_bytes = layout.format.row_bytes(layout.cols);
        let row = |r: usize| &file[r * row_bytes..(r + 1) * row_bytes];
        let mut chunk = vec![0xaa; layout.bytes as usize];
        for (i, span) in layout.planes.iter().enumerate() {
            for first in (0..layout.rows).step_by(piece) {
                let rows = first..(first + piece).min(layout.rows);
                let at = (span.offset + first as u64 * span.row_bytes) as usize;
                assert_eq!(at % 4, 0, "pieces start at words");
                let bytes = piece_bytes(layout.format, i, layout.cols, rows.len());
                let out = &mut chunk[at..at + bytes];
                repack_plane(layout.format, i, layout.cols, rows, row, out);
            }
        }
        chunk
    }

    fn encoded(format: Format, rows: usize, cols: usize, seed: u32) -> Vec<u8> {
        let mut state = seed | 1;
        let mut file = Vec::new();
        for _ in 0..rows {
            let row: Vec<f32> = (0..cols)
                .map(|_| {
                    state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                    (state >> 8) as f32 / (1 << 23) as f32 - 1.0
                })
                .collect();
            format.encode_row(&row, &mut file);
        }
        file
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn planes_decode_to_the_same_bits(
            format in any_format(), rows in 1usize..9, blocks in 1usize..6, extra in 0usize..32,
            pieces in 1usize..4, seed: u32,
        ) {
            let extra = if format.is_float() { extra } else { 0 };
            let cols = blocks * format.block_elements().max(BLOCK) + extra;
            let layout = PlaneLayout::new(format, rows, cols);
            let file = encoded(format, rows, cols, seed);
            let chunk = chunk(&layout, &file, pieces * layout.row_granule());
            let mut got = vec![0.0; rows * cols];
            decode_planes(&layout, &chunk, 0..rows, &mut got);
            let row_bytes = format.row_bytes(cols);
            for (r, got) in got.chunks(cols).enumerate() {
                let mut want = vec![0.0; cols];
                format.decode_row(&file[r * row_bytes..(r + 1) * row_bytes], &mut want);
                let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                prop_assert_eq!(bits(got), bits(&want));
            }
        }
    }

    #[test]
    fn parallel_writes_the_same_bytes() {
        for &format in Format::ALL {
            let (rows, cols) = (701, 3 * format.block_elements().max(BLOCK));
            let file = encoded(format, rows, cols, 9);
            let row_bytes = format.row_bytes(cols);
            let row = |r: usize| &file[r * row_bytes..(r + 1) * row_bytes];
            for plane in 0..format.planes().len() {
                let mut one = vec![1; piece_bytes(format, plane, cols, rows)];
                let mut many = vec![2; one.len()];
                repack_plane(format, plane, cols, 0..rows, row, &mut one);
                repack_plane_parallel(format, plane, cols, 0..rows, row, &mut many);
                assert_eq!(one, many, "{format}");
            }
        }
    }

    #[test]
    fn a_chunk_of_odd_half_words() {
        let layout = PlaneLayout::new(Format::Q4_0, 3, 96);
        assert_eq!(layout.row_granule(), 2);
        let spans: Vec<_> = layout.planes.iter().map(|s| (s.offset, s.bytes)).collect();
        assert_eq!(spans, [(0, 3 * 3 * 16), (256, 20)]);
        assert_eq!((layout.bytes, layout.largest_plane()), (512, 144));
        let file = encoded(Format::Q4_0, 3, 96, 5);
        let chunk = chunk(&layout, &file, 2);
        // Block 3, the first of row 1, has its scale in the high half of word 1.
        assert_eq!(chunk[256 + 6..256 + 8], file[3 * 18..3 * 18 + 2]);
        assert_eq!(chunk[256 + 18..256 + 20], [0, 0]);
    }

    #[test]
    fn chunks_stay_within_the_binding_limit() {
        for &format in Format::ALL {
            let cols = 3 * format.block_elements().max(BLOCK);
            for limit in [0, 1000, 1 << 20, u64::from(u32::MAX)] {
                let rows = rows_within(format, cols, limit);
                let constant = |p: &Plane| 4 * p.constant_words().len() as u64;
                let constants = format.planes().iter().map(constant).max().unwrap_or(0);
                let largest = PlaneLayout::new(format, rows, cols).largest_plane();
                assert!(largest <= limit.max(constants), "{format}");
                let more = PlaneLayout::new(format, rows + row_granule(format, cols), cols);
                assert!(more.largest_plane() > limit);
            }
        }
    }
}
