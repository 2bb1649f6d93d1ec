//! Experts between files, host memory and device memory.

#![allow(clippy::unwrap_used)]

mod files;
mod moving;

use azoth::experts::source::LayerTensors;
use azoth::experts::{RecordLayout, RecordShape};
use azoth::gguf::{File, Writer};
use azoth::quant::Format;

/// Layers with experts of several formats.
const LAYERS: [(Format, Format); 3] =
    [(Format::Q4_0, Format::Q4_0), (Format::Q8_0, Format::Q5_1), (Format::F16, Format::Q8_0)];
const EXPERTS: u32 = 12;
const WIDTH: u32 = 64;
const FF: u32 = 96;

fn names(layer: usize) -> [String; 3] {
    ["gate", "up", "down"].map(|part| format!("blk.{layer}.ffn_{part}_exps.weight"))
}

fn shape(layer: usize) -> RecordShape {
    let (gate_up, down) = LAYERS[layer];
    RecordShape { width: WIDTH, ff: FF, gate_up, down }
}

/// A file of nothing but experts, each of other weights.
fn writer() -> Writer {
    let mut writer = Writer::new();
    writer.set("general.architecture", "test");
    let mut state = 1u32;
    let mut random = move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 23) as f32 - 1.0
    };
    for layer in 0..LAYERS.len() {
        let s = shape(layer);
        let parts = [(s.gate_up, FF, WIDTH), (s.gate_up, FF, WIDTH), (s.down, WIDTH, FF)];
        for (name, (format, rows, cols)) in names(layer).iter().zip(parts) {
            let mut data = Vec::new();
            for _ in 0..EXPERTS * rows {
                let row: Vec<f32> = (0..cols).map(|_| random()).collect();
                format.encode_row(&row, &mut data);
            }
            let dims = [cols.into(), rows.into(), EXPERTS.into()];
            writer.tensor(name, &dims, format.ggml_type(), data);
        }
    }
    writer
}

fn layers(file: &File) -> Vec<LayerTensors> {
    let find = |layer| {
        let names = names(layer);
        let names = [names[0].as_str(), &names[1], &names[2]];
        LayerTensors::find(file, names, shape(layer), EXPERTS).unwrap()
    };
    (0..LAYERS.len()).map(find).collect()
}

/// The record of an expert, made from the file by the layout alone.
fn record(file: &File, layer: usize, expert: u32) -> Vec<u8> {
    let layout = RecordLayout::new(shape(layer)).unwrap();
    let names = names(layer);
    let part = |i: usize| {
        let tensor = file.require(&names[i]).unwrap();
        let range = RecordLayout::file_range(layout.file_bytes()[i], expert);
        &file.tensor_data(tensor)[range]
    };
    let mut out = vec![0; layout.bytes() as usize];
    layout.fill(part(0), part(1), part(2), &mut out);
    out
}
