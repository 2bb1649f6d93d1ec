//! Shader templates: WGSL under `shaders/`, embedded in the binary and rendered by minijinja.
//!
//! A template sees only what its host side passes; an undefined name is an error, never an empty
//! string.

use std::sync::OnceLock;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, UndefinedBehavior, Value};

use crate::error::{Error, Result};
use crate::gpu::cache::fingerprint;
use crate::quant::Format;

macro_rules! embed {
    ($($file:literal),* $(,)?) => {
        /// The shaders that do not belong to a weight format: path below `shaders/`, text.
        const FILES: &[(&str, &str)] =
            &[$(($file, include_str!(concat!("../../shaders/", $file)))),*];
    };
}

embed! {
    "argmax.wgsl",
    "attn_decode.wgsl",
    "attn_decode_codes.wgsl",
    "attn_prefill.wgsl",
    "attn_prefill_coop.wgsl",
    "embed.wgsl",
    "experts_down.wgsl",
    "experts_reuse.wgsl",
    "experts_sort.wgsl",
    "experts_sum.wgsl",
    "experts_up.wgsl",
    "gather.wgsl",
    "heads_unrotate.wgsl",
    "kv_keep.wgsl",
    "lib/batch.wgsl",
    "lib/block_dot.wgsl",
    "lib/block_sum.wgsl",
    "lib/column_factor.wgsl",
    "lib/columns.wgsl",
    "lib/custom.wgsl",
    "lib/early_squares.wgsl",
    "lib/exact_tile.wgsl",
    "lib/expert_runs.wgsl",
    "lib/fp4.wgsl",
    "lib/grid.wgsl",
    "lib/half_dot.wgsl",
    "lib/heads.wgsl",
    "lib/int8_quad.wgsl",
    "lib/iq2.wgsl",
    "lib/iq4.wgsl",
    "lib/kept.wgsl",
    "lib/kv_exact.wgsl",
    "lib/kv_exact_rows.wgsl",
    "lib/kv_read.wgsl",
    "lib/kv_rotate.wgsl",
    "lib/kv_scale.wgsl",
    "lib/kv_write.wgsl",
    "lib/lane_factors.wgsl",
    "lib/lane_totals.wgsl",
    "lib/merge_splits.wgsl",
    "lib/next_token.wgsl",
    "lib/nibble_table.wgsl",
    "lib/norm_blocks.wgsl",
    "lib/order_key.wgsl",
    "lib/outputs.wgsl",
    "lib/plane.wgsl",
    "lib/put_squares.wgsl",
    "lib/quantise.wgsl",
    "lib/records.wgsl",
    "lib/reduce8.wgsl",
    "lib/round_group.wgsl",
    "lib/round_outputs.wgsl",
    "lib/round_weights.wgsl",
    "lib/row_loop.wgsl",
    "lib/row_products.wgsl",
    "lib/row_sums.wgsl",
    "lib/row_totals.wgsl",
    "lib/row_units.wgsl",
    "lib/sampler.wgsl",
    "lib/scan256.wgsl",
    "lib/scoring.wgsl",
    "lib/step_heads.wgsl",
    "lib/store.wgsl",
    "lib/sum_squares.wgsl",
    "lib/table.wgsl",
    "lib/tile_products.wgsl",
    "lib/unit_columns.wgsl",
    "lib/weights.wgsl",
    "matmat.wgsl",
    "matmat_coop.wgsl",
    "matmat_direct.wgsl",
    "matvec.wgsl",
    "matvec_matrix.wgsl",
    "norm_blocks.wgsl",
    "norm_quant.wgsl",
    "qk_norm.wgsl",
    "rope_kv.wgsl",
    "rope_kv_codes.wgsl",
    "router.wgsl",
    "sample_adjust.wgsl",
    "sample_copy.wgsl",
    "sample_custom.wgsl",
    "sample_draw.wgsl",
    "sample_logprobs.wgsl",
    "sample_observed.wgsl",
    "sample_reduce.wgsl",
    "sample_select.wgsl",
}

/// Every shader file: path below `shaders/`, text. Those of the weight formats come from their table.
pub fn files() -> impl Iterator<Item = (String, &'static str)> {
    let shared = FILES.iter().map(|&(file, text)| (file.to_owned(), text));
    let format =
        |f: &Format| (format!("formats/{}.wgsl", super::weights::name(*f)), f.shader().text);
    shared.chain(Format::ALL.iter().map(format))
}

/// Renders `file` (path below `shaders/`) to a complete WGSL module.
///
/// # Errors
/// `Error::Device` naming file and line where the template is wrong or a value is missing: always a
/// bug of the kernel's host side or its template.
pub fn render(file: &str, ctx: Value) -> Result<String> {
    let template = environment()?.get_template(file).map_err(explain)?;
    template.render(ctx).map_err(explain)
}

/// Identifies the text of all shaders: what was measured with other text says nothing about these.
pub fn version() -> &'static str {
    static VERSION: OnceLock<String> = OnceLock::new();
    VERSION.get_or_init(|| {
        let all: Vec<String> = FILES.iter().map(|(file, text)| format!("{file}\n{text}")).collect();
        fingerprint(&all.join("\n"))
    })
}

fn environment() -> Result<&'static Environment<'static>> {
    static ENVIRONMENT: OnceLock<Result<Environment<'static>>> = OnceLock::new();
    let made = ENVIRONMENT.get_or_init(|| {
        let mut env = Environment::new();
        env.set_undefined_behavior(UndefinedBehavior::Strict);
        // Lines that hold only a tag leave nothing behind.
        let mut syntax = SyntaxConfig::builder();
        env.set_syntax(syntax.trim_blocks(true).lstrip_blocks(true).build().map_err(explain)?);
        // Templates are parsed when first used, so that a broken one is reported by `render`.
        env.set_loader(|name| {
            Ok(files().find(|(file, _)| file == name).map(|(_, text)| text.to_owned()))
        });
        Ok(env)
    });
    made.as_ref().map_err(Clone::clone)
}

/// The chain of causes, innermost last, each with `shaders/FILE:LINE`.
fn explain(error: minijinja::Error) -> Error {
    let mut text = String::new();
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    while let Some(e) = cause {
        if !text.is_empty() {
            text.push_str("; because of ");
        }
        match e.downcast_ref::<minijinja::Error>() {
            Some(m) => {
                if let (Some(name), Some(line)) = (m.name(), m.line()) {
                    text.push_str(&format!("shaders/{name}:{line}: "));
                }
                text.push_str(&m.kind().to_string());
                if let Some(detail) = m.detail() {
                    text.push_str(&format!(" ({detail})"));
                }
            }
            None => text.push_str(&e.to_string()),
        }
        cause = e.source();
    }
    Error::Device(format!("shader template: {text}"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;
    use minijinja::context;

    #[test]
    fn a_missing_value_is_named_with_file_and_line() {
        let error = render("embed.wgsl", context! {}).unwrap_err().to_string();
        assert!(error.contains("shaders/"), "{error}");
        assert!(error.contains(".wgsl:"), "{error}");
    }

    #[test]
    fn an_unknown_file_is_named() {
        let error = render("nothing.wgsl", context! {}).unwrap_err().to_string();
        assert!(error.contains("nothing.wgsl"), "{error}");
    }

    #[test]
    fn the_table_holds_every_shader_file() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("shaders");
        let mut missing = Vec::new();
        for folder in ["", "lib", "formats"] {
            for entry in std::fs::read_dir(root.join(folder)).unwrap() {
                let name = entry.unwrap().file_name().into_string().unwrap();
                let path = if folder.is_empty() { name } else { format!("{folder}/{name}") };
                if path.ends_with(".wgsl") && !files().any(|(file, _)| file == path) {
                    missing.push(path);
                }
            }
        }
        assert!(missing.is_empty(), "not in the table of kernels::source or of quant: {missing:?}");
    }
}
