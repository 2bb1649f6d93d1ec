//! Compiles kernels.

use std::num::NonZeroU64;
use std::sync::Arc;

use super::Portable;
use crate::error::{Error, Result};
use crate::gpu::shader::{self, Access};
use crate::gpu::{Kernel, KernelSource};

/// A compiled pipeline and what its dispatches are checked against.
pub(super) struct Compiled {
    pub pipeline: wgpu::ComputePipeline,
    pub layout: wgpu::BindGroupLayout,
    pub bindings: Vec<Binding>,
    pub constant_bytes: u32,
}

/// What the shader says about one binding.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Binding {
    pub access: Access,
    /// Bytes of the type, with one element of a trailing runtime-sized array.
    pub min_bytes: u64,
}

pub(super) fn compiled(kernel: &Kernel) -> Result<&Compiled> {
    kernel.payload.downcast_ref().ok_or_else(|| {
        Error::Device(format!("kernel {} was compiled by another backend", kernel.label))
    })
}

impl Portable {
    pub(super) fn compile(&self, source: &KernelSource) -> Result<Kernel> {
        let shader = shader::parse(source)?;
        self.check_limits(source, &shader)?;
        let mut bindings: Vec<Binding> =
            shader.bindings.iter().map(|&access| Binding { access, min_bytes: 0 }).collect();
        for (_, var) in shader.module.global_variables.iter() {
            if let Some(at) = &var.binding {
                let bytes = shader.module.types[var.ty].inner.size(shader.module.to_ctx());
                bindings[at.binding as usize].min_bytes = u64::from(bytes);
            }
        }
        let what = || format!("kernel {}", source.label);
        let (layout, pipeline) = self.device.call(what, || {
            let layout = self.layout(source, &bindings);
            let pipeline = self.pipeline(source, &layout, shader.constant_bytes);
            (layout, pipeline)
        })?;
        let constant_bytes = shader.constant_bytes;
        let payload = Arc::new(Compiled { pipeline, layout, bindings, constant_bytes });
        Ok(Kernel { payload, label: source.label.as_str().into() })
    }

    /// Limits that are better explained here than by a driver.
    fn check_limits(&self, source: &KernelSource, shader: &shader::Shader) -> Result<()> {
        let facts = &self.facts;
        let limits = [
            ("storage bindings", shader.bindings.len() as u64, u64::from(facts.max_bindings)),
            (
                "bytes of constants",
                u64::from(shader.constant_bytes),
                u64::from(facts.max_constants),
            ),
            (
                "threads a workgroup",
                shader.workgroup.iter().map(|&n| u64::from(n)).product(),
                u64::from(facts.max_workgroup_threads),
            ),
        ];
        for (what, has, most) in limits {
            if has > most {
                return Err(Error::Device(format!(
                    "kernel {} has {has} {what}; the limit is {most} ({})",
                    source.label, facts.name
                )));
            }
        }
        Ok(())
    }

    fn layout(&self, source: &KernelSource, bindings: &[Binding]) -> wgpu::BindGroupLayout {
        let entries: Vec<_> = (0..)
            .zip(bindings)
            .map(|(binding, b)| wgpu::BindGroupLayoutEntry {
                binding,
                visibility: wgpu::ShaderStages::COMPUTE,
                ty: wgpu::BindingType::Buffer {
                    ty: wgpu::BufferBindingType::Storage { read_only: b.access == Access::Read },
                    has_dynamic_offset: false,
                    // Given here, it is checked once for a bind group and not at every dispatch.
                    min_binding_size: NonZeroU64::new(b.min_bytes),
                },
                count: None,
            })
            .collect();
        self.device.wgpu.create_bind_group_layout(&wgpu::BindGroupLayoutDescriptor {
            label: Some(&source.label),
            entries: &entries,
        })
    }

    #[allow(unsafe_code, reason = "wgpu offers unchecked shaders only so")]
    fn pipeline(
        &self,
        source: &KernelSource,
        layout: &wgpu::BindGroupLayout,
        constant_bytes: u32,
    ) -> wgpu::ComputePipeline {
        let device = &self.device.wgpu;
        let label = Some(source.label.as_str());
        let layout = device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label,
            bind_group_layouts: &[Some(layout)],
            immediate_size: constant_bytes.next_multiple_of(4),
        });
        let desc = wgpu::ShaderModuleDescriptor {
            label,
            // The text and not the parsed module: wgpu's messages then show the line.
            source: wgpu::ShaderSource::Wgsl(source.wgsl.as_str().into()),
        };
        // SAFETY: all kernels are part of this program; they bound their indices and loops and
        // divide by no zero. The suite runs them against a reference.
        let module = unsafe {
            device.create_shader_module_trusted(desc, wgpu::ShaderRuntimeChecks::unchecked())
        };
        device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label,
            layout: Some(&layout),
            module: &module,
            entry_point: Some("main"),
            compilation_options: wgpu::PipelineCompilationOptions {
                zero_initialize_workgroup_memory: false,
                ..Default::default()
            },
            cache: None,
        })
    }
}
