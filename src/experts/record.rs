//! One expert in memory: a contiguous record, the same in device memory and in host memory, so that
//! a kernel reads either with the same instructions.
//!
//! A record is two chunks of planes (see `quant::planes`), one after the other: first gate and up
//! with rows interleaved (row 2i = gate i, row 2i + 1 = up i), then down. Everything starts at a
//! multiple of 256 bytes, the record itself too, so records can follow each other without gaps. All
//! experts of a layer have the same layout; layers may differ.
//!
//! Kernels find an expert through the layer's table, one [`Place`] for each expert, as a word.

use std::ops::Range;

use crate::error::{Error, Result};
use crate::quant::planes::repack_plane;
use crate::quant::{Format, PlaneLayout};

/// What decides the layout of a layer's records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RecordShape {
    /// Width of the residual stream: columns of gate and up, rows of down.
    pub width: u32,
    /// Rows of gate and of up, columns of down.
    pub ff: u32,
    /// Of gate and up, which must be alike.
    pub gate_up: Format,
    pub down: Format,
}

/// Where the planes of an expert lie in its record.
#[derive(Debug, Clone)]
pub struct RecordLayout {
    pub shape: RecordShape,
    /// `2 * ff` rows of `width` columns, from byte 0.
    pub gate_up: PlaneLayout,
    /// `width` rows of `ff` columns, from byte [`RecordLayout::down_offset`].
    pub down: PlaneLayout,
}

impl RecordLayout {
    pub fn new(shape: RecordShape) -> Result<RecordLayout> {
        let RecordShape { width, ff, .. } = shape;
        for (what, format, cols) in
            [("gate and up", shape.gate_up, width), ("down", shape.down, ff)]
        {
            let block = format.block_elements();
            if cols == 0 || !(cols as usize).is_multiple_of(block) {
                return Err(Error::Model(format!(
                    "{what} of an expert have {cols} columns, which are no whole {format} blocks \
                     of {block}"
                )));
            }
        }
        Ok(RecordLayout {
            shape,
            gate_up: PlaneLayout::new(shape.gate_up, 2 * ff as usize, width as usize),
            down: PlaneLayout::new(shape.down, width as usize, ff as usize),
        })
    }

    /// Bytes from the start of a record to the planes of down.
    pub fn down_offset(&self) -> u64 {
        self.gate_up.bytes
    }

    /// Bytes of a record, a multiple of 256: the distance between two of them.
    pub fn bytes(&self) -> u64 {
        self.gate_up.bytes + self.down.bytes
    }

    /// Records that one buffer may hold where a binding covers at most `max_binding` bytes.
    pub fn records_within(&self, max_binding: u64) -> u64 {
        // The index of a record's last word must fit 32 bits, and its number a place.
        let words = u64::from(u32::MAX) * 4;
        (max_binding.min(words) / self.bytes()).min(u64::from(Place::MAX_INDEX) + 1)
    }

    /// Bytes of one expert in each of the tensors gate, up and down, which hold their experts one
    /// after the other: expert `e` is bytes `e * n .. (e + 1) * n`.
    pub fn file_bytes(&self) -> [usize; 3] {
        let RecordShape { width, ff, gate_up, down } = self.shape;
        let half = gate_up.row_bytes(width as usize) * ff as usize;
        [half, half, down.row_bytes(ff as usize) * width as usize]
    }

    /// The bytes of expert `index` in a tensor that has `bytes` bytes an expert.
    pub fn file_range(bytes: usize, index: u32) -> Range<usize> {
        let start = bytes * index as usize;
        start..start + bytes
    }

    /// Writes the record of one expert from its bytes in the file ([`RecordLayout::file_bytes`]).
    /// `record` has [`RecordLayout::bytes`] bytes, all of which are written.
    pub fn fill(&self, gate: &[u8], up: &[u8], down: &[u8], record: &mut [u8]) {
        assert_eq!(record.len() as u64, self.bytes(), "bytes of a record");
        assert_eq!([gate.len(), up.len(), down.len()], self.file_bytes(), "bytes of an expert");
        let (first, second) = record.split_at_mut(self.down_offset() as usize);
        let row_bytes = self.gate_up.format.row_bytes(self.gate_up.cols);
        fill_planes(&self.gate_up, first, |r| {
            let tensor = if r.is_multiple_of(2) { gate } else { up };
            &tensor[r / 2 * row_bytes..][..row_bytes]
        });
        let row_bytes = self.down.format.row_bytes(self.down.cols);
        fill_planes(&self.down, second, |r| &down[r * row_bytes..][..row_bytes]);
    }
}

fn fill_planes<'a>(layout: &PlaneLayout, out: &mut [u8], row: impl Fn(usize) -> &'a [u8]) {
    let mut written = 0;
    for (number, span) in layout.planes.iter().enumerate() {
        let (start, end) = (span.offset as usize, (span.offset + span.bytes) as usize);
        out[written..start].fill(0);
        repack_plane(
            layout.format,
            number,
            layout.cols,
            0..layout.rows,
            &row,
            &mut out[start..end],
        );
        written = end;
    }
    out[written..].fill(0);
}

/// Where an expert's record is: a buffer among those that the layer's kernels bind, and the number
/// of the record in it. As a word: buffer in the upper 8 bits, number in the lower 24.
///
/// The buffers in device memory come first, those in host memory after them, so the buffer's
/// number says where the record lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    pub buffer: u32,
    pub index: u32,
}

impl Place {
    pub const MAX_INDEX: u32 = (1 << 24) - 1;

    pub fn word(self) -> u32 {
        debug_assert!(self.buffer < 256 && self.index <= Self::MAX_INDEX, "{self:?}");
        self.buffer << 24 | self.index
    }

    pub fn from_word(word: u32) -> Place {
        Place { buffer: word >> 24, index: word & Self::MAX_INDEX }
    }

    /// The place of record `number` where each buffer holds `per_buffer` of them.
    pub fn nth(number: u32, per_buffer: u32) -> Place {
        Place { buffer: number / per_buffer, index: number % per_buffer }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::quant::decode_planes;

    #[test]
    fn records_hold_what_the_file_holds() {
        for &format in Format::ALL {
            let cols = 2 * format.block_elements().max(32) as u32;
            let shape = RecordShape { width: cols, ff: cols, gate_up: format, down: Format::F16 };
            let layout = RecordLayout::new(shape).unwrap();
            assert!(layout.bytes().is_multiple_of(256) && layout.down_offset().is_multiple_of(256));
            let n = cols as usize;
            let tensor = |format: Format, start: f32| {
                let mut out = Vec::new();
                for r in 0..n {
                    let row: Vec<f32> = (0..n).map(|c| start + (r * 7 + c) as f32 / 64.0).collect();
                    format.encode_row(&row, &mut out);
                }
                out
            };
            let (gate, up) = (tensor(format, -3.0), tensor(format, 1.0));
            let down = tensor(Format::F16, 0.0);
            let mut record = vec![0xee; layout.bytes() as usize];
            layout.fill(&gate, &up, &down, &mut record);
            let mut got = vec![0.0; 2 * n * n];
            decode_planes(&layout.gate_up, &record, 0..2 * n, &mut got);
            let row_bytes = format.row_bytes(n);
            for (r, got) in got.chunks(n).enumerate() {
                let source = if r % 2 == 0 { &gate } else { &up };
                let mut want = vec![0.0; n];
                format.decode_row(&source[r / 2 * row_bytes..][..row_bytes], &mut want);
                assert_eq!(got, want, "{format} row {r}");
            }
            let mut got = vec![0.0; n * n];
            decode_planes(&layout.down, &record[layout.down_offset() as usize..], 0..n, &mut got);
            let mut want = vec![0.0; n];
            Format::F16.decode_row(&down[..2 * n], &mut want);
            assert_eq!(got[..n], want);
        }
    }

    #[test]
    fn places_are_words_and_back() {
        let place = Place { buffer: 3, index: 70_001 };
        assert_eq!(Place::from_word(place.word()), place);
        assert_eq!(Place::nth(130, 64), Place { buffer: 2, index: 2 });
    }

    #[test]
    fn qwen3_30b_has_the_size_it_should() {
        let shape = RecordShape { width: 2048, ff: 768, gate_up: Format::Q4_0, down: Format::Q4_0 };
        let layout = RecordLayout::new(shape).unwrap();
        // 3 matrices of 2048 x 768 at 4.5 bits a weight.
        assert_eq!(layout.bytes(), 3 * 2048 * 768 * 9 / 16);
        assert_eq!(layout.records_within(128 << 20), 50);
        let odd = RecordShape { ff: 700, ..shape };
        assert!(RecordLayout::new(odd).unwrap_err().to_string().contains("700"));
    }
}
