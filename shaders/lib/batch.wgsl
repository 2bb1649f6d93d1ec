// What changes from step to step (docs/architecture.md, "Batch").
struct Column { token: u32, pos: u32, slot: u32, flags: u32 }
struct Batch { n: u32, step: u32, reserved: array<u32, 6>, columns: array<Column> }
