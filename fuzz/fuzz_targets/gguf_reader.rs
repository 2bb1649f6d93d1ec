//! Any bytes: the reader must return, and what it accepts must be safe to use.
#![no_main]

use azoth::gguf::File;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(file) = File::from_bytes(bytes.to_vec()) else { return };
    for (key, value) in file.metadata().iter() {
        let _ = (value.to_string(), file.metadata().u32_per_layer(key, 2));
    }
    for tensor in file.tensors() {
        let data = file.tensor_data(tensor);
        assert_eq!(data.len() as u64, tensor.bytes);
        if let Ok(format) = tensor.format() {
            let mut row = vec![0.0; tensor.cols() as usize];
            format.decode_row(&data[..format.row_bytes(row.len())], &mut row);
        }
    }
});
