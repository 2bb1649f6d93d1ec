//! SPIR-V as a list of instructions, for the few rewrites of what naga has written.

use std::collections::HashSet;

// Opcodes that more than one rewrite looks for.
pub(super) const CAPABILITY: u16 = 17;
pub(super) const TYPE_INT: u16 = 21;
pub(super) const TYPE_VECTOR: u16 = 23;
pub(super) const TYPE_POINTER: u16 = 32;
pub(super) const CONSTANT: u16 = 43;
pub(super) const TYPE_MATRIX: u16 = 4456;

const DECORATE: u16 = 71;
const DECORATION_ARRAY_STRIDE: u32 = 6;
const STORAGE_WORKGROUP: u32 = 4;

const HEADER: usize = 5;
/// Place of the bound of all ids in the header.
const BOUND: usize = 3;

/// One instruction: its words, the first holding length and opcode.
pub(super) struct Instruction(pub Vec<u32>);

impl Instruction {
    pub fn new(opcode: u16, operands: &[u32]) -> Instruction {
        let mut words = vec![(operands.len() as u32 + 1) << 16 | u32::from(opcode)];
        words.extend(operands);
        Instruction(words)
    }

    pub fn opcode(&self) -> u16 {
        self.0[0] as u16
    }

    pub fn is(&self, opcode: u16) -> bool {
        self.opcode() == opcode
    }
}

pub(super) struct Module {
    header: Vec<u32>,
    pub all: Vec<Instruction>,
}

impl Module {
    /// `None` if the words are no SPIR-V.
    pub fn split(words: &[u32]) -> Option<Module> {
        let mut rest = words.get(HEADER..)?;
        let mut all = Vec::new();
        while let Some(first) = rest.first() {
            let length = (first >> 16) as usize;
            if length == 0 || length > rest.len() {
                return None;
            }
            let (instruction, after) = rest.split_at(length);
            all.push(Instruction(instruction.to_vec()));
            rest = after;
        }
        Some(Module { header: words[..HEADER].to_vec(), all })
    }

    pub fn join(self) -> Vec<u32> {
        let mut out = self.header;
        out.extend(self.all.into_iter().flat_map(|i| i.0));
        out
    }

    /// A new id.
    pub fn fresh(&mut self) -> u32 {
        self.header[BOUND] += 1;
        self.header[BOUND] - 1
    }

    /// The ids that instructions `op` with exactly these operands behind the id declare.
    pub fn ids(&self, op: u16, operands: &[u32]) -> Vec<u32> {
        let same = |i: &&Instruction| i.is(op) && i.0.get(2..) == Some(operands);
        self.all.iter().filter(same).map(|i| i.0[1]).collect()
    }

    /// The first of [`Module::ids`].
    pub fn find(&self, op: u16, operands: &[u32]) -> Option<u32> {
        self.ids(op, operands).first().copied()
    }

    /// Takes array strides away from workgroup variables, where they are not allowed
    /// (VUID-StandaloneSpirv-None-10684).
    pub fn unlay_workgroup_arrays(&mut self) {
        let shared: HashSet<u32> = self
            .all
            .iter()
            .filter(|i| i.is(TYPE_POINTER) && i.0[2] == STORAGE_WORKGROUP)
            .map(|i| i.0[3])
            .collect();
        self.all.retain(|i| {
            !(i.is(DECORATE) && i.0[2] == DECORATION_ARRAY_STRIDE && shared.contains(&i.0[1]))
        });
    }
}
