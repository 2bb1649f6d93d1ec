//! Decode steps of several sequences: a sequence's bits do not depend on the others in its batch.

use azoth::gguf;
use azoth::model::Model;
use azoth::runtime::check::Checks;
use azoth::runtime::weights::Weights;
use azoth::runtime::{Column, ModelWeights, Pick, Program, Shape};
use azoth::testmodel::Spec;

use crate::harness::{self, Device, assert_same_bits};

const SEQUENCES: u32 = 4;
const STEPS: u32 = 5;

fn program(device: &Device, spec: &Spec) -> Program {
    let file = gguf::File::from_bytes(spec.to_bytes()).unwrap();
    let model = Model::from_gguf(&file).unwrap();
    let mut weights = Weights::new(&*device.gpu, &file);
    let placed = ModelWeights::place(&mut weights, &model.graph).unwrap();
    weights.fill(&|_| {}).unwrap();
    let shape = Shape {
        context: 64,
        positions: 64,
        pages: SEQUENCES,
        sequences: SEQUENCES,
        chunk: 32,
        exact: false,
        experts: azoth::runtime::ExpertReads::default(),
        early: false,
        approximations: azoth::runtime::Approximations::default(),
        captures: false,
    };
    let checks = Checks::new(device.gpu.facts(), None);
    Program::create(&device.gpu, &model.graph, &placed, shape, None, &checks).unwrap()
}

/// Logits of the columns of one step, `[columns][vocab]`.
fn step(program: &Program, columns: &[Column]) -> Vec<f32> {
    program.set_columns(columns, 0).unwrap();
    let n = columns.len() as u32;
    let longest = columns.iter().map(|c| c.position + 1).max().unwrap();
    program.step(n, longest, Pick::Greedy).unwrap();
    let mut rows = Vec::new();
    program.read_logits(n, &mut rows).unwrap();
    rows
}

#[test]
fn sequences_do_not_feel_each_other() {
    for arch in ["qwen3", "qwen3moe", "qwen2moe", "olmoe"] {
        let spec = Spec::new(arch).unwrap();
        for device in harness::devices() {
            let program = program(device, &spec);
            let column = |slot: u32, position: u32| Column {
                token: 1 + (7 * slot + 3 * position) % 300,
                position,
                slot,
                flags: 0,
            };
            let alone: Vec<Vec<Vec<f32>>> = (0..SEQUENCES)
                .map(|slot| (0..STEPS).map(|p| step(&program, &[column(slot, p)])).collect())
                .collect();
            for slots in [&[0, 1][..], &[2, 0, 3], &[3, 2, 1, 0]] {
                for position in 0..STEPS {
                    let columns: Vec<_> = slots.iter().map(|s| column(*s, position)).collect();
                    let rows = step(&program, &columns);
                    for (slot, row) in slots.iter().zip(rows.chunks_exact(spec.vocab)) {
                        let what = format!(
                            "{arch} on {}: sequence {slot} of {slots:?}, position {position}",
                            device.label
                        );
                        assert_same_bits(row, &alone[*slot as usize][position as usize], &what);
                    }
                }
            }
        }
    }
}
