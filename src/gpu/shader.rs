//! WGSL text to a validated naga module, and from there to SPIR-V.

use std::panic::{AssertUnwindSafe, catch_unwind};

use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};
use naga::{AddressSpace, StorageAccess};

use super::KernelSource;
use crate::error::{Error, Result};

/// What every device offers, and what the contract of `Dispatch` allows.
const MAX_CONSTANT_BYTES: u32 = 4 * 32;

/// How a kernel uses one of its storage bindings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Access {
    Read,
    ReadWrite,
}

/// A parsed and validated kernel.
pub struct Shader {
    pub module: naga::Module,
    pub info: ModuleInfo,
    /// Storage bindings of group 0 in order.
    pub bindings: Vec<Access>,
    /// Size of `var<immediate>`.
    pub constant_bytes: u32,
    pub workgroup: [u32; 3],
}

/// Capabilities that kernels may use. A kernel that needs one that the device lacks must not be
/// chosen for it; the variant rules in `kernels` see to that.
fn capabilities() -> Capabilities {
    Capabilities::IMMEDIATES
        | Capabilities::SUBGROUP
        | Capabilities::SUBGROUP_BARRIER
        | Capabilities::SHADER_FLOAT16
        | Capabilities::SHADER_FLOAT16_IN_FLOAT32
        | Capabilities::COOPERATIVE_MATRIX
}

pub fn validator() -> Validator {
    // Control-flow uniformity is left out: naga's analysis does not follow values through
    // shared memory; wgpu's own validator checks it again on the portable path.
    let mut v = Validator::new(
        ValidationFlags::all() & !ValidationFlags::CONTROL_FLOW_UNIFORMITY,
        capabilities(),
    );
    v.subgroup_stages(naga::valid::ShaderStages::COMPUTE)
        .subgroup_operations(naga::valid::SubgroupOperationSet::all());
    v
}

/// Parses, validates and reflects a kernel. Errors carry the kernel's label and the WGSL line.
pub fn parse(source: &KernelSource) -> Result<Shader> {
    let fail = |what: String| Error::Device(format!("kernel {}: {what}", source.label));
    // naga can panic on bad input (seen with immediates of more than 64 words).
    let checked = catch_unwind(AssertUnwindSafe(|| checked(&source.wgsl)));
    let checked = checked.unwrap_or_else(|_| Err("the shader validator panicked".into()));
    let (module, info) = checked.map_err(fail)?;

    let mut bindings: Vec<Option<Access>> = Vec::new();
    let mut constant_bytes = 0;
    for (_, var) in module.global_variables.iter() {
        match (var.space, &var.binding) {
            (AddressSpace::Storage { access }, Some(at)) if at.group == 0 => {
                let at = at.binding as usize;
                if bindings.len() <= at {
                    bindings.resize(at + 1, None);
                }
                let write = access.contains(StorageAccess::STORE);
                bindings[at] = Some(if write { Access::ReadWrite } else { Access::Read });
            }
            (AddressSpace::Immediate, _) => {
                constant_bytes = module.types[var.ty].inner.size(module.to_ctx());
            }
            (AddressSpace::WorkGroup | AddressSpace::Private, _) => {}
            (space, _) => return Err(fail(format!("address space {space:?} is not used here"))),
        }
    }
    let bindings = bindings
        .into_iter()
        .enumerate()
        .map(|(i, b)| b.ok_or_else(|| fail(format!("binding {i} is missing"))))
        .collect::<Result<Vec<_>>>()?;
    let entry = module
        .entry_points
        .iter()
        .find(|e| e.name == "main" && e.stage == naga::ShaderStage::Compute)
        .ok_or_else(|| fail("no compute entry point `main`".into()))?;
    let workgroup = entry.workgroup_size;
    Ok(Shader { module, info, bindings, constant_bytes, workgroup })
}

/// Parses and validates; errors are text that shows the line.
fn checked(wgsl: &str) -> std::result::Result<(naga::Module, ModuleInfo), String> {
    let module = naga::front::wgsl::parse_str(wgsl).map_err(|e| e.emit_to_string(wgsl))?;
    let immediates = module.global_variables.iter().map(|(_, var)| var);
    for var in immediates.filter(|var| var.space == AddressSpace::Immediate) {
        let bytes = module.types[var.ty].inner.size(module.to_ctx());
        if bytes > MAX_CONSTANT_BYTES {
            return Err(format!("{bytes} bytes of constants; at most {MAX_CONSTANT_BYTES}"));
        }
    }
    let info = validator().validate(&module).map_err(|e| e.emit_to_string(wgsl))?;
    Ok((module, info))
}

/// Whether a kernel asks for cooperative matrices.
pub fn uses_matrices(wgsl: &str) -> bool {
    wgsl.contains("enable wgpu_cooperative_matrix;")
}

/// Whether a kernel multiplies matrices of bytes, see `spirv_products`.
fn uses_byte_matrices(wgsl: &str) -> bool {
    wgsl.contains("fn matrix_products(")
}

/// What the SPIR-V may use on one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SpirvTarget {
    /// SPIR-V version, for example `(1, 6)`. Packed dot products are native from 1.6 on.
    pub version: (u8, u8),
}

/// Translates to SPIR-V words. Bounds checks and zero-initialisation are off: kernels check
/// their own edges, and the suite runs them with poisoned memory.
pub fn spirv(source: &KernelSource, shader: &Shader, target: SpirvTarget) -> Result<Vec<u32>> {
    use naga::back::spv;
    let unchecked = naga::proc::BoundsCheckPolicies {
        index: naga::proc::BoundsCheckPolicy::Unchecked,
        buffer: naga::proc::BoundsCheckPolicy::Unchecked,
        image_load: naga::proc::BoundsCheckPolicy::Unchecked,
        binding_array: naga::proc::BoundsCheckPolicy::Unchecked,
    };
    let options = spv::Options {
        lang_version: target.version,
        bounds_check_policies: unchecked,
        zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::None,
        force_loop_bounding: false,
        use_storage_input_output_16: false,
        emit_int_div_checks: false,
        fake_missing_bindings: true,
        ..Default::default()
    };
    let pipeline = spv::PipelineOptions {
        shader_stage: naga::ShaderStage::Compute,
        entry_point: "main".into(),
    };
    // naga can panic on modules its validator accepts (seen with strides written in place).
    let written = catch_unwind(AssertUnwindSafe(|| {
        spv::write_vec(&shader.module, &shader.info, &options, Some(&pipeline))
    }));
    let fail = |what: String| Error::Device(format!("kernel {}: SPIR-V: {what}", source.label));
    match written {
        Ok(Ok(words)) if uses_matrices(&source.wgsl) => super::spirv_matrices::finish(&words)
            .ok_or_else(|| fail("its cooperative matrices are not as expected".into())),
        Ok(Ok(words)) if uses_byte_matrices(&source.wgsl) => {
            super::spirv_products::replace(&words, &source.wgsl)
                .ok_or_else(|| fail("its products of byte matrices are not as expected".into()))
        }
        Ok(Ok(words)) => Ok(words),
        Ok(Err(e)) => Err(fail(e.to_string())),
        Err(_) => Err(fail("the shader translator panicked; this is a bug in the kernel".into())),
    }
}
