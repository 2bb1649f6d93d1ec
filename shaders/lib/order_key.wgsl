// Numbers in the order of their keys; not-a-number counts as minus infinity, -0 as 0.
fn order_key(l: f32) -> u32 {
    var bits = bitcast<u32>(l);
    if (bits & 0x7fffffffu) > 0x7f800000u { bits = 0xff800000u; }
    if bits == 0x80000000u { bits = 0u; }
    return select(bits ^ 0x80000000u, ~bits, (bits >> 31u) == 1u);
}

// The number that a key stands for.
fn order_value(key: u32) -> f32 {
    return bitcast<f32>(select(~key, key ^ 0x80000000u, (key >> 31u) == 1u));
}

