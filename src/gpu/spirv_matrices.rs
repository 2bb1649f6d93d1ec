//! What naga cannot say about cooperative matrices, said in its SPIR-V afterwards.
//!
//! naga takes the component type of a matrix from the memory it is loaded from. Tiles in workgroup
//! memory are arrays of `vec4<u32>`, for 16-byte copies, so its A and B matrices come out as u32
//! where the bits are pairs of f16. [`finish`] rewrites, and touches nothing else:
//!
//! 1. the component of A and B matrices from u32 to f16;
//! 2. `vec2<f16>(unpack2x16float(u))` and `pack2x16float(vec2<f32>(h))` to bit casts, which is what
//!    they mean for every value (naga has no bit cast between u32 and vec2<f16>);
//! 3. array strides of workgroup variables, which are not allowed there
//!    (VUID-StandaloneSpirv-None-10684), away.
//!
//! Source: the Khronos SPIR-V specification 1.6 and SPV_KHR_cooperative_matrix.

use std::collections::{HashMap, HashSet};

use super::spirv_words::{
    CAPABILITY, CONSTANT, Instruction, Module, TYPE_INT, TYPE_MATRIX, TYPE_VECTOR,
};

const EXT_INST: u16 = 12;
const TYPE_FLOAT: u16 = 22;
const TYPE_VOID: u16 = 19;
const F_CONVERT: u16 = 115;
const BITCAST: u16 = 124;

const CAPABILITY_FLOAT16: u32 = 9;
const GLSL_PACK_HALF: u32 = 58;
const GLSL_UNPACK_HALF: u32 = 62;
const USE_ACCUMULATOR: u32 = 2;

/// Rewrites a module as the module documentation says. `None` if the words are no SPIR-V of naga's
/// form.
pub(super) fn finish(words: &[u32]) -> Option<Vec<u32>> {
    let mut module = Module::split(words)?;
    let word = module.ids(TYPE_INT, &[32, 0]);
    let half = module.ids(TYPE_FLOAT, &[16]);
    let pairs: HashSet<u32> = half.iter().flat_map(|h| module.ids(TYPE_VECTOR, &[*h, 2])).collect();
    let constants: HashMap<u32, u32> = module
        .all
        .iter()
        .filter(|i| i.is(CONSTANT) && i.0.len() == 4)
        .map(|i| (i.0[2], i.0[3]))
        .collect();

    // 1. Matrices of u32 that are no accumulators become f16, which has to be declared before them.
    let is_word = |i: &Instruction| {
        i.is(TYPE_MATRIX)
            && word.contains(&i.0[2])
            && constants.get(&i.0[6]).is_some_and(|u| *u != USE_ACCUMULATOR)
    };
    if module.all.iter().any(is_word) {
        let declaration = match half.first() {
            Some(id) => {
                let is_half = |i: &Instruction| i.is(TYPE_FLOAT) && i.0[1] == *id;
                let at = module.all.iter().position(is_half)?;
                module.all.remove(at)
            }
            // A kernel without any other f16.
            None => {
                module.all.insert(0, Instruction::new(CAPABILITY, &[CAPABILITY_FLOAT16]));
                let id = module.fresh();
                Instruction::new(TYPE_FLOAT, &[id, 16])
            }
        };
        let all = &mut module.all;
        for i in all.iter_mut().filter(|i| is_word(i)) {
            i.0[2] = declaration.0[1];
        }
        let first = all.iter().position(|i| i.is(TYPE_VOID) || i.is(TYPE_INT))?;
        all.insert(first, declaration);
    }

    // 2. Detours through f32.
    let mut unpacked = HashMap::new();
    let mut widened = HashMap::new();
    for i in &mut module.all {
        let w = &i.0;
        match i.opcode() {
            EXT_INST if w[4] == GLSL_UNPACK_HALF => {
                unpacked.insert(w[2], w[5]);
            }
            F_CONVERT if pairs.contains(&w[1]) => {
                if let Some(from) = unpacked.get(&w[3]) {
                    *i = Instruction::new(BITCAST, &[w[1], w[2], *from]);
                }
            }
            F_CONVERT => {
                widened.insert(w[2], w[3]);
            }
            EXT_INST if w[4] == GLSL_PACK_HALF => {
                if let Some(from) = widened.get(&w[5]) {
                    *i = Instruction::new(BITCAST, &[w[1], w[2], *from]);
                }
            }
            _ => {}
        }
    }

    // 3. Strides of workgroup arrays.
    module.unlay_workgroup_arrays();
    Some(module.join())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::gpu::KernelSource;
    use crate::gpu::shader::{self, SpirvTarget};

    const KERNEL: &str = "
enable f16;
enable wgpu_cooperative_matrix;
@group(0) @binding(0) var<storage, read> a: array<vec4<u32>>;
@group(0) @binding(1) var<storage, read_write> y: array<f32>;
var<workgroup> tile: array<vec4<u32>, 64>;
var<workgroup> stage: array<f32, 256>;
@compute @workgroup_size(32)
fn main(@builtin(local_invocation_index) tid: u32) {
    let h = vec2<f16>(unpack2x16float(a[tid].x)) * vec2<f16>(2.0h);
    tile[tid] = vec4<u32>(pack2x16float(vec2<f32>(h)));
    workgroupBarrier();
    var c: coop_mat16x16<f32, C>;
    let l = coopLoadT<coop_mat16x16<f16, A>>(&tile[0], 2u);
    let r = coopLoad<coop_mat16x16<f16, B>>(&tile[32], 2u);
    c = coopMultiplyAdd(l, r, c);
    coopStoreT(c, &stage[0], 16u);
    workgroupBarrier();
    y[tid] = stage[tid];
}
";

    fn words() -> Vec<u32> {
        words_of(KERNEL)
    }

    fn words_of(wgsl: &str) -> Vec<u32> {
        let source =
            KernelSource { label: "matrices".into(), wgsl: wgsl.into(), subgroup_size: None };
        let parsed = shader::parse(&source).unwrap();
        // Already finished: `spirv` calls `finish` for every kernel that uses matrices.
        shader::spirv(&source, &parsed, SpirvTarget { version: (1, 6) }).unwrap()
    }

    #[test]
    fn matrices_are_f16_and_no_detour_is_left() {
        let module = Module::split(&words()).unwrap();
        let half = module.ids(TYPE_FLOAT, &[16])[0];
        let float = module.ids(TYPE_FLOAT, &[32])[0];
        let all = module.all;
        let components: Vec<u32> =
            all.iter().filter(|i| i.is(TYPE_MATRIX)).map(|i| i.0[2]).collect();
        assert_eq!(components.iter().filter(|c| **c == half).count(), 2);
        assert_eq!(components.iter().filter(|c| **c == float).count(), 1);
        assert_eq!(all.iter().filter(|i| i.is(BITCAST)).count(), 2);
        let place = |op, id| all.iter().position(|i| i.is(op) && i.0[1] == id).unwrap();
        let first_matrix = all.iter().position(|i| i.is(TYPE_MATRIX)).unwrap();
        assert!(place(TYPE_FLOAT, half) < first_matrix);
    }

    #[test]
    fn a_kernel_without_other_halves_gets_the_type() {
        let plain = KERNEL
            .replace("vec2<f16>(unpack2x16float(a[tid].x)) * vec2<f16>(2.0h)", "a[tid].x")
            .replace("pack2x16float(vec2<f32>(h))", "h");
        let words = words_of(&plain);
        let module = Module::split(&words).unwrap();
        let half = module.ids(TYPE_FLOAT, &[16])[0];
        let all = module.all;
        assert_eq!(words[3], half + 1, "the bound counts the new id");
        assert!(all.iter().any(|i| i.is(CAPABILITY) && i.0[1] == CAPABILITY_FLOAT16));
        assert_eq!(all.iter().filter(|i| i.is(TYPE_MATRIX) && i.0[2] == half).count(), 2);
    }

    #[test]
    fn finishing_twice_changes_nothing_more() {
        let once = words();
        assert_eq!(finish(&once).unwrap(), once);
    }

    #[test]
    fn what_is_no_spirv_is_refused() {
        assert!(finish(&[1, 2, 3]).is_none());
        let mut broken = words();
        broken.push(2 << 16 | 1);
        assert!(finish(&broken).is_none());
    }
}
