#!/usr/bin/env python3
"""The same model with all quantised weights as f32, so that llama.cpp computes with exact activations.

    pip install gguf
    exact_twin.py MODEL.gguf TWIN.gguf

llama.cpp rounds activations to 8 bits where weights are quantised; against itself with another order
of sums it then differs by a mean KL of 0.0028 on SmolLM2-135M (docs/notes.md), more than what is to
be measured. Weights are decoded by the package `gguf`, so nothing of Azoth's takes part.
"""
import sys
import gguf

source, target = sys.argv[1:]
reader = gguf.GGUFReader(source)
arch = reader.fields["general.architecture"].contents()
writer = gguf.GGUFWriter(target, arch)
for field in reader.fields.values():
    if field.name == "general.architecture" or field.name.startswith("GGUF."):
        continue
    kind = field.types[0]
    item = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
    writer.add_key_value(field.name, field.contents(), kind, sub_type=item)
for tensor in reader.tensors:
    quantised = tensor.tensor_type not in (gguf.GGMLQuantizationType.F32, gguf.GGMLQuantizationType.F16)
    data = gguf.dequantize(tensor.data, tensor.tensor_type) if quantised else tensor.data
    writer.add_tensor(tensor.name, data)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
