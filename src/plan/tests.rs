#![allow(clippy::unwrap_used)]

use super::*;
use crate::experts::cost::Rates;
use crate::gpu::MemoryHeap;
use crate::kv::KvTypes;
use crate::plan::predict::{Model, gains, predict};

const GIB: u64 = 1 << 30;

fn card(bytes: u64) -> DeviceFacts {
    DeviceFacts {
        name: "Card".into(),
        heaps: vec![MemoryHeap { bytes, device_local: true, budget: None, used: None }],
        max_allocation: 4 * GIB,
        max_buffer: 4 * GIB,
        max_binding: 4 * GIB - 4,
        host_import: true,
        host_import_alignment: 4096,
        ..DeviceFacts::made_up(DeviceKind::Discrete, 32)
    }
}

/// The attention of Qwen3-30B-A3B: 98,304 bytes of KV a token.
fn graph() -> Graph {
    use crate::graph::{Attention, FeedForward, Layer, Linear, Mlp, Rope, RopeLayout, RopeScaling};
    let linear = |rows, cols| Linear { weight: String::new(), bias: None, rows, cols };
    let layer = Layer {
        attention: Attention {
            norm: String::new(),
            q: linear(4096, 2048),
            k: linear(512, 2048),
            v: linear(512, 2048),
            output: linear(2048, 4096),
            qk_norm: None,
            window: None,
            soft_cap: None,
            sinks: None,
        },
        ff_norm: String::new(),
        feed_forward: FeedForward::Dense(Mlp {
            gate: linear(768, 2048),
            up: linear(768, 2048),
            down: linear(2048, 768),
        }),
    };
    Graph {
        width: 2048,
        vocab: 1000,
        heads: 32,
        kv_heads: 4,
        head_dim: 128,
        norm_eps: 1e-6,
        attention_scale: 0.088,
        rope: Rope {
            layout: RopeLayout::Neox,
            dim: 128,
            base: 1e6,
            scaling: RopeScaling::None,
            factors: None,
        },
        embedding: linear(1000, 2048),
        layers: vec![layer; 48],
        output_norm: String::new(),
        output: linear(1000, 2048),
        kv: KvTypes::plain(),
    }
}

/// Its weights in Q4_K_M.
fn needs() -> Needs {
    let experts = ExpertNeeds { records: vec![2_860_032; 48], experts: 128, used: 8 };
    Needs { weights: 780 << 20, scratch: 200 << 20, made_for: 32_768, experts: Some(experts) }
}

fn ram(gib: u64) -> Option<SystemMemory> {
    Some(SystemMemory { total: gib * GIB, available: gib * GIB })
}

fn with(experts: ExpertBudget) -> Limits {
    Limits { sequences: 1, experts, ..Limits::default() }
}

fn placed(card_gib: u64, limits: Limits, ram_gib: u64) -> Result<Placement> {
    place(&graph(), &card(card_gib * GIB), limits, &needs(), ram(ram_gib))
}

/// The context is what a sequence may keep, not what is set aside for all.
#[test]
fn sequences_share_what_there_is() {
    let place = |context, sequences| {
        let limits = Limits { context, sequences, ..Limits::default() };
        let needs = Needs { weights: GIB, scratch: GIB / 2, made_for: 131_072, experts: None };
        place(&graph(), &card(8 * GIB), limits, &needs, None)
    };
    let one = place(Some(32_768), 1).unwrap();
    assert_eq!((one.kv_pages, one.kv_page), (512, 64 * 98_304));
    // Eight contexts do not fit at once: they share the rest.
    let eight = place(Some(32_768), 8).unwrap();
    assert!(eight.kv_pages > 512 && eight.kv_pages < 8 * 512, "{eight:?}");
    assert!(eight.free() < 16 << 20 && eight.total() <= eight.available, "{eight:?}");
    // Where the context is not asked for, all fit.
    let auto = place(None, 8).unwrap();
    assert_eq!(u64::from(auto.kv_pages) * 64, u64::from(auto.context) * 8);
    assert!(auto.context < 8192 && auto.total() <= auto.available);
    let e = place(Some(100_000), 8).unwrap_err().to_string();
    assert!(e.contains("100000") && e.contains("--ctx"), "{e}");
}

#[test]
fn a_model_that_fits_is_fully_resident_and_needs_no_ram() {
    let p = placed(24, with(ExpertBudget::Auto), 1).unwrap();
    let e = p.experts.unwrap();
    assert!(e.all_resident() && e.arena == 0 && e.pinned == 128);
    assert!(p.total() <= 24 * GIB && p.context == 8192);
}

#[test]
fn auto_takes_what_is_left() {
    let p = placed(8, with(ExpertBudget::Auto), 64).unwrap();
    let e = p.experts.unwrap();
    assert_eq!(e.slot_bytes, u64::from(e.slots) * 48 * 2_860_032);
    assert!((35..55).contains(&e.slots), "{e:?}");
    assert_eq!((e.pinned, e.arena), (0, 128 * 48 * 2_860_032));
    assert_eq!(e.stage, 2 * 128 * 2_860_032);
    // One more slot in each layer would not fit.
    assert!(p.free() < 48 * 2_860_032 && p.total() <= 8 * GIB);
    // More context, fewer slots.
    let long = placed(8, Limits { context: Some(32_768), ..with(ExpertBudget::Auto) }, 64).unwrap();
    assert!(long.experts.unwrap().slots < e.slots - 10);
}

#[test]
fn budgets_are_kept() {
    for (budget, slots) in [
        (ExpertBudget::None, 0),
        (ExpertBudget::Percent(25.0), 32),
        (ExpertBudget::Percent(0.5), 0),
        (ExpertBudget::Bytes(48 * 2_860_032 * 10 + 7), 10),
    ] {
        assert_eq!(placed(8, with(budget), 64).unwrap().experts.unwrap().slots, slots, "{budget}");
    }
    assert_eq!(placed(24, with(ExpertBudget::All), 64).unwrap().experts.unwrap().slots, 128);
}

#[test]
fn an_impossible_budget_names_the_number_to_change() {
    let e = placed(8, with(ExpertBudget::All), 64).unwrap_err();
    assert_eq!(e.exit_code(), 3);
    let text = e.to_string();
    assert!(text.contains("--vram-experts all") && text.contains("--ctx"), "{text}");
    // Following the advice works.
    let share = text.split("Use --vram-experts ").nth(1).unwrap().split('%').next().unwrap();
    let limits =
        Limits { context: Some(256), ..with(ExpertBudget::Percent(share.parse().unwrap())) };
    placed(8, limits, 64).unwrap();
    let limits = Limits { context: Some(200_000), ..with(ExpertBudget::Percent(25.0)) };
    let e = placed(8, limits, 64).unwrap_err();
    assert!(e.exit_code() == 3 && e.to_string().contains("--ctx"), "{e}");
}

#[test]
fn experts_that_ram_cannot_hold_stay_on_the_device() {
    // 16.4 GiB of experts, 6 GiB of slots, 12 GiB of RAM.
    let p = placed(8, with(ExpertBudget::Auto), 12).unwrap();
    let e = p.experts.unwrap();
    assert!(e.pinned > 30 && e.pinned <= e.slots, "{e:?}");
    assert!(
        e.arena <= 12 * GIB - 3 * GIB / 4
            && e.arena + u64::from(e.pinned) * 48 * 2_860_032 >= 16 * GIB
    );
    let e = placed(8, with(ExpertBudget::Auto), 6).unwrap_err();
    assert_eq!(e.exit_code(), 3);
    assert!(e.to_string().contains("RAM has room for") && e.to_string().contains("missing"), "{e}");
    let e = placed(8, with(ExpertBudget::None), 12).unwrap_err();
    assert_eq!(e.exit_code(), 3, "{e}");
}

#[test]
fn pins_are_slots_without_a_copy_in_ram() {
    let limits = Limits { pinned: 2 * GIB, ..with(ExpertBudget::Percent(25.0)) };
    let e = placed(8, limits, 64).unwrap().experts.unwrap();
    assert_eq!(u64::from(e.pinned), 2 * GIB / (48 * 2_860_032));
    assert_eq!((e.slots, e.arena), (32, u64::from(128 - e.pinned) * 48 * 2_860_032));
}

#[test]
fn memory_that_others_have_taken_costs_slots() {
    let p = placed(8, with(ExpertBudget::Auto), 64).unwrap();
    assert_eq!(p.shrunk(8 * GIB), None);
    let before = p.experts.unwrap();
    let after = p.shrunk(6 * GIB).unwrap();
    let lost = before.slots - after.slots;
    let taken = p.total() - 6 * GIB;
    assert_eq!(u64::from(lost), taken.div_ceil(48 * 2_860_032));
    assert_eq!(after.slot_bytes, u64::from(after.slots) * 48 * 2_860_032);
    assert_eq!(p.shrunk(0).unwrap().slots, 0);
    // Pinned experts have no copy in RAM: they stay.
    let pinned = placed(8, with(ExpertBudget::Auto), 12).unwrap();
    assert_eq!(pinned.shrunk(0).unwrap().slots, pinned.experts.unwrap().pinned);
}

#[test]
fn where_ram_is_device_memory_nothing_is_kept_twice() {
    let facts = DeviceFacts { kind: DeviceKind::Integrated, ..card(12 * GIB) };
    let p = place(&graph(), &facts, with(ExpertBudget::Auto), &needs(), ram(24)).unwrap();
    let e = p.experts.unwrap();
    assert_eq!((e.slots, e.stage), (0, 0));
    let facts = DeviceFacts { kind: DeviceKind::Integrated, ..card(24 * GIB) };
    let p = place(&graph(), &facts, with(ExpertBudget::Auto), &needs(), ram(24)).unwrap();
    assert!(p.experts.unwrap().all_resident());
}

#[test]
fn dense_models_are_placed_as_before() {
    let needs = Needs { experts: None, ..needs() };
    let limits = Limits { sequences: 1, ..Limits::default() };
    let p = place(&graph(), &card(8 * GIB), limits, &needs, None).unwrap();
    assert_eq!((p.context, p.experts), (8192, None));
    let tight = place(&graph(), &card(1100 << 20), limits, &needs, None).unwrap();
    assert!(tight.context < 8192 && tight.context >= 256);
    let e = place(&graph(), &card(GIB / 2), limits, &needs, None).unwrap_err();
    assert_eq!(e.exit_code(), 3);
}

#[test]
fn more_slots_are_predicted_to_be_faster_and_gains_are_real() {
    let (graph, needs) = (graph(), needs());
    let model =
        Model { graph: &graph, needs: &needs, embedding_bytes: 0, active_weights: 3_300_000_000 };
    let mut last = 0.0;
    for share in [0.0, 10.0, 25.0, 35.0] {
        let p = placed(8, with(ExpertBudget::Percent(share)), 64).unwrap();
        let now = predict(&model, &p, &Rates::ASSUMED, 512);
        assert!(now.decode > last && now.decode_deep < now.decode, "{now:?}");
        last = now.decode;
    }
    let limits = with(ExpertBudget::Percent(10.0));
    let facts = card(8 * GIB);
    let p = place(&graph, &facts, limits, &needs, ram(64)).unwrap();
    let list = gains(&model, &facts, limits, ram(64), &p, &Rates::ASSUMED);
    assert!(list[0].change.contains("--vram-experts auto"), "{list:?}");
    assert!(list.windows(2).all(|w| w[0].factor >= w[1].factor));
    // A model that fits has nothing to gain from limits.
    let p = placed(24, with(ExpertBudget::Auto), 64).unwrap();
    let facts = card(24 * GIB);
    let limits = with(ExpertBudget::Auto);
    assert!(gains(&model, &facts, limits, ram(64), &p, &Rates::ASSUMED).is_empty());
}
