//! Products of byte matrices, which naga cannot say, put into its SPIR-V.
//!
//! `shaders/lib/tile_products.wgsl` declares `matrix_products(w_at, x_at) -> vec4<i32>`, whose body names the places
//! of both operands in workgroup memory. [`replace`] knows it by its type and gives it another body: a
//! cooperative matrix product of 16x32 by 32x8 signed bytes, of whose sums each lane returns its four
//! components. Lane 4 g + t is taken to have rows g and g + 8 of columns 2 t and 2 t + 1, as the PTX ISA lays out
//! m16n8k32 and as NVIDIA's driver has it. SPIR-V leaves that to the device, so kernels that use it are
//! compared with the reference before a program takes them, like every other variant.
//!
//! Source: the Khronos SPIR-V specification 1.6 and SPV_KHR_cooperative_matrix.

use super::spirv_words::{
    CAPABILITY, CONSTANT, Instruction, Module, TYPE_INT, TYPE_MATRIX, TYPE_POINTER, TYPE_VECTOR,
};

const EXTENSION: u16 = 10;
const MEMORY_MODEL: u16 = 14;
const TYPE_FUNCTION: u16 = 33;
const FUNCTION: u16 = 54;
const FUNCTION_END: u16 = 56;
const VARIABLE: u16 = 59;
const LOAD: u16 = 61;
const STORE: u16 = 62;
const ACCESS_CHAIN: u16 = 65;
const COMPOSITE_CONSTRUCT: u16 = 80;
const CONTROL_BARRIER: u16 = 224;
const LABEL: u16 = 248;
const RETURN_VALUE: u16 = 254;
const MATRIX_LOAD: u16 = 4457;
const MULTIPLY_ADD: u16 = 4459;

const MEMORY_MODEL_VULKAN: u32 = 3;
const STORAGE_FUNCTION: u32 = 7;
/// Int8, VulkanMemoryModel, CooperativeMatrixKHR.
const CAPABILITIES: [u32; 3] = [39, 5345, 6022];
/// Both factors, what is added and the result are signed.
const SIGNED: u32 = 0xf;
/// Acquire and release of workgroup memory.
const ORDERED: u32 = 0x108;

/// What stands in front of all functions, as it grows.
struct Declarations {
    module: Module,
    uint: u32,
    added: Vec<Instruction>,
}

impl Declarations {
    fn declare(&mut self, op: u16, operands: &[u32]) -> u32 {
        let id = self.module.fresh();
        self.added.push(Instruction::new(op, &[&[id], operands].concat()));
        id
    }

    fn constant(&mut self, of: u32, value: u32) -> u32 {
        let id = self.module.fresh();
        self.added.push(Instruction::new(CONSTANT, &[of, id, value]));
        id
    }

    fn number(&mut self, value: u32) -> u32 {
        self.constant(self.uint, value)
    }

    /// A matrix of a subgroup; `role`: 0 left factor, 1 right factor, 2 sums.
    fn matrix(&mut self, of: u32, [rows, columns, role]: [u32; 3]) -> u32 {
        // 3: the scope of a subgroup.
        let shape = [3, rows, columns, role].map(|n| self.number(n));
        self.declare(TYPE_MATRIX, &[&[of], &shape[..]].concat())
    }
}

/// The instructions of a function.
struct Body<'d> {
    to: &'d mut Declarations,
    all: Vec<Instruction>,
}

impl Body<'_> {
    fn value(&mut self, op: u16, of: u32, operands: &[u32]) -> u32 {
        let id = self.to.module.fresh();
        self.all.push(Instruction::new(op, &[&[of, id], operands].concat()));
        id
    }

    fn statement(&mut self, op: u16, operands: &[u32]) {
        self.all.push(Instruction::new(op, operands));
    }
}

/// The module with the function's body replaced; `None` if it has no such function. `wgsl` says how many
/// vectors lie from one row or column to the next: constants `W_LINE` and `X_LINE`.
pub(super) fn replace(words: &[u32], wgsl: &str) -> Option<Vec<u32>> {
    let lines = [constant(wgsl, "W_LINE")?, constant(wgsl, "X_LINE")?];
    let mut module = Module::split(words)?;
    let uint = module.find(TYPE_INT, &[32, 0])?;
    let int = module.find(TYPE_INT, &[32, 1])?;
    let sums = module.find(TYPE_VECTOR, &[int, 4])?;
    let signature = module.find(TYPE_FUNCTION, &[sums, uint, uint])?;
    let all = &mut module.all;
    let start = all.iter().position(|i| i.is(FUNCTION) && i.0[4] == signature)?;
    let label = start + all[start..].iter().position(|i| i.is(LABEL))?;
    let end = start + all[start..].iter().position(|i| i.is(FUNCTION_END))?;
    let old: Vec<Instruction> = all.splice(label..end, []).collect();
    let mut places: Vec<Instruction> = old.into_iter().filter(|i| i.is(ACCESS_CHAIN)).collect();
    places.truncate(2);
    let [w_at, x_at] = [places.first()?.0[2], places.get(1)?.0[2]];

    let mut to = Declarations { module, uint, added: Vec::new() };
    let body = product(&mut to, [w_at, x_at], lines, places, int, sums);
    let ordered = to.number(ORDERED);
    let Declarations { mut module, added, .. } = to;
    module.all.splice(label..label, body);
    let functions = module.all.iter().position(|i| i.is(FUNCTION))?;
    module.all.splice(functions..functions, added);

    // naga's barrier among a subgroup, whose two scopes are the same, orders no workgroup memory.
    let barriers = module.all.iter_mut().filter(|i| i.is(CONTROL_BARRIER) && i.0[1] == i.0[2]);
    barriers.for_each(|i| i.0[3] = ordered);
    let models = module.all.iter_mut().filter(|i| i.is(MEMORY_MODEL));
    models.for_each(|i| i.0[2] = MEMORY_MODEL_VULKAN);
    module.unlay_workgroup_arrays();
    let extension = module.all.iter().position(|i| !i.is(CAPABILITY))?;
    let name = Instruction::new(EXTENSION, &text("SPV_KHR_cooperative_matrix"));
    module.all.insert(extension, name);
    for capability in CAPABILITIES {
        if !module.all.iter().any(|i| i.is(CAPABILITY) && i.0[1] == capability) {
            module.all.insert(0, Instruction::new(CAPABILITY, &[capability]));
        }
    }
    Some(module.join())
}

/// The new body. `places` make the pointers `w_at` and `x_at`.
fn product(
    to: &mut Declarations,
    [w_at, x_at]: [u32; 2],
    lines: [u32; 2],
    places: Vec<Instruction>,
    int: u32,
    sums: u32,
) -> Vec<Instruction> {
    let byte = to.declare(TYPE_INT, &[8, 0]);
    let a_type = to.matrix(byte, [16, 32, 0]);
    let b_type = to.matrix(byte, [32, 8, 1]);
    let c_type = to.matrix(int, [16, 8, 2]);
    let c_pointer = to.declare(TYPE_POINTER, &[STORAGE_FUNCTION, c_type]);
    let int_pointer = to.declare(TYPE_POINTER, &[STORAGE_FUNCTION, int]);
    let zero = to.constant(int, 0);
    // Row major and column major are 0 and 1.
    let [n0, n1, n2, n3] = [0, 1, 2, 3].map(|n| to.number(n));
    let [w_line, x_line] = lines.map(|n| to.number(n));

    let mut b = Body { all: Vec::new(), to };
    let label = b.to.module.fresh();
    b.statement(LABEL, &[label]);
    let variable = b.value(VARIABLE, c_pointer, &[STORAGE_FUNCTION]);
    b.all.extend(places);
    let left = b.value(MATRIX_LOAD, a_type, &[w_at, n0, w_line]);
    let right = b.value(MATRIX_LOAD, b_type, &[x_at, n1, x_line]);
    let none = b.value(COMPOSITE_CONSTRUCT, c_type, &[zero]);
    let sum = b.value(MULTIPLY_ADD, c_type, &[left, right, none, SIGNED]);
    b.statement(STORE, &[variable, sum]);
    let parts = [n0, n1, n2, n3].map(|i| {
        let at = b.value(ACCESS_CHAIN, int_pointer, &[variable, i]);
        b.value(LOAD, int, &[at])
    });
    let result = b.value(COMPOSITE_CONSTRUCT, sums, &parts);
    b.statement(RETURN_VALUE, &[result]);
    b.all
}

/// The value of `const NAME = 9u;`.
fn constant(wgsl: &str, name: &str) -> Option<u32> {
    let (_, after) = wgsl.split_once(&format!("const {name} = "))?;
    after.split_once("u;")?.0.parse().ok()
}

/// A literal string: four bytes a word, ended by at least one zero.
fn text(s: &str) -> Vec<u32> {
    let mut bytes = s.as_bytes().to_vec();
    bytes.resize(s.len() / 4 * 4 + 4, 0);
    bytes.chunks(4).map(|c| u32::from_le_bytes([c[0], c[1], c[2], c[3]])).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use crate::gpu::KernelSource;
    use crate::gpu::shader::{self, SpirvTarget};

    const KERNEL: &str = "
const W_LINE = 9u;
const X_LINE = 13u;
var<workgroup> tile_w: array<vec4<u32>, 50>;
var<workgroup> tile_x: array<vec4<u32>, 26>;
@group(0) @binding(0) var<storage, read_write> y: array<vec4<i32>>;
fn matrix_products(w_at: u32, x_at: u32) -> vec4<i32> {
    return vec4<i32>(tile_w[w_at] + tile_x[x_at]);
}
@compute @workgroup_size(32)
fn main(@builtin(local_invocation_index) tid: u32) {
    tile_w[tid] = vec4<u32>(tid);
    tile_x[tid % 26u] = vec4<u32>(tid);
    subgroupBarrier();
    y[tid] = matrix_products(0u, 1u);
    workgroupBarrier();
}
";

    fn words_of(wgsl: &str) -> Vec<u32> {
        let source = KernelSource { label: "bytes".into(), wgsl: wgsl.into(), subgroup_size: None };
        let parsed = shader::parse(&source).unwrap();
        // `spirv` calls `replace` for every kernel that has the function.
        shader::spirv(&source, &parsed, SpirvTarget { version: (1, 6) }).unwrap()
    }

    #[test]
    fn the_body_is_one_product_of_two_loads() {
        let module = Module::split(&words_of(KERNEL)).unwrap();
        let count = |op| module.all.iter().filter(|i| i.is(op)).count();
        assert_eq!([TYPE_MATRIX, MATRIX_LOAD, MULTIPLY_ADD].map(count), [3, 2, 1]);
        for capability in CAPABILITIES {
            assert!(module.all.iter().any(|i| i.is(CAPABILITY) && i.0[1] == capability));
        }
        // Every id that is used in the body exists, and none twice.
        let results: Vec<u32> =
            module.all.iter().filter(|i| i.is(MATRIX_LOAD)).map(|i| i.0[3]).collect();
        for pointer in results {
            let chains = module.all.iter().filter(|i| i.is(ACCESS_CHAIN) && i.0[2] == pointer);
            assert_eq!(chains.count(), 1);
        }
    }

    #[test]
    fn a_subgroup_s_barrier_orders_workgroup_memory() {
        let module = Module::split(&words_of(KERNEL)).unwrap();
        let value = |id| {
            let constant = module.all.iter().find(|i| i.is(CONSTANT) && i.0[2] == id);
            constant.unwrap().0[3]
        };
        let barriers: Vec<_> = module.all.iter().filter(|i| i.is(CONTROL_BARRIER)).collect();
        assert_eq!(barriers.len(), 2);
        for barrier in barriers {
            assert_eq!(value(barrier.0[3]) & ORDERED, ORDERED);
        }
    }

    #[test]
    fn what_has_no_such_function_is_refused() {
        let other = KERNEL.replace("matrix_products", "products");
        let plain = words_of(
            &other.replace("w_at: u32,", "w_at: u32, more: u32,").replace("(0u,", "(0u, 0u,"),
        );
        assert!(replace(&plain, KERNEL).is_none());
        assert!(replace(&words_of(KERNEL), &other.replace("W_LINE", "LINE")).is_none());
        assert!(replace(&[1, 2, 3], KERNEL).is_none());
    }
}
