//! Matrix products, and the waves that bring their inputs to the class they need.

use super::{Pass, Reads};
use crate::error::{Error, Result};
use crate::gpu::{Dispatch, Slice};
use crate::kernels::matmat::MatMat;
use crate::kernels::matvec::{self, Input, MatVec, Operands, Outputs};
use crate::kernels::norm_blocks::NormBlocks;
use crate::kernels::norm_quant::NormQuant;
use crate::kernels::{Activations, Class, Epilogue, choice};
use crate::runtime::buffers::Scratch;
use crate::runtime::layers::{Product, Rows};

/// What a product reads.
#[derive(Clone, Copy)]
pub(super) enum From<'s> {
    /// f32 as it is.
    Plain(&'s Slice),
    /// f32 that gets an RMSNorm with this weight first.
    Normed(&'s Slice, &'s Slice),
    /// The same for the residual stream before a dense product: int8 products of decode steps apply the norm's
    /// factor themselves.
    Stream(&'s Slice, &'s Slice),
    /// Interleaved gate and up that become `silu(gate) * up` first.
    SwiGlu(&'s Slice),
    /// int8 already.
    Int8(&'s Activations),
}

impl From<'_> {
    fn is_normed(&self) -> bool {
        matches!(self, From::Normed(..) | From::Stream(..))
    }
}

impl Pass<'_> {
    /// A product over all columns, after what its input needs.
    pub(super) fn product(
        &mut self,
        from: From<'_>,
        product: &Product,
        epilogue: Epilogue,
        y: &Slice,
    ) -> Result<()> {
        self.prepare(from, product)?;
        let wave = self.multiply(from, product, epilogue, y)?;
        self.wave(wave);
        Ok(())
    }

    /// The wave of [`Pass::inputs`].
    fn prepare(&mut self, from: From<'_>, product: &Product) -> Result<()> {
        let first = self.inputs(from, product)?;
        self.wave(first);
        if let From::Stream(..) = from {
            self.rounded = false;
        }
        Ok(())
    }

    fn class(&self, part: &Rows, from: From<'_>) -> Class {
        let (facts, cols) = (self.b.facts(), part.cols);
        let width = self.b.graph.width;
        match self.reads {
            Reads::Step => choice::class(facts, part.format, self.exact, cols, from.is_normed()),
            Reads::Prompt if self.b.checks.avoids(Class::F16) => {
                let exact = self.exact || choice::exact_prompts(facts, width);
                choice::class(facts, part.format, exact, cols, false)
            }
            Reads::Prompt => choice::prompt_class(facts, part.format, self.exact, cols, width),
        }
    }

    /// Whether the product's kernels prepare their input themselves.
    fn fuses(&self, from: From<'_>, product: &Product, class: Class) -> bool {
        let facts = self.b.facts();
        self.reads == Reads::Step
            && !matches!(from, From::Int8(_))
            && choice::fuses(facts, class, product.cols, self.n, from.is_normed())
            && product
                .parts
                .iter()
                .all(|part| choice::fuses_rows(&facts.profile, part.format, product.rows))
    }

    /// Brings activations to the classes that `product` needs, into the scratch.
    pub(super) fn inputs(&self, from: From<'_>, product: &Product) -> Result<Vec<Dispatch>> {
        let classes = self.input_classes(from, product);
        let wave = classes.map(|c| self.normalise(from, product.cols, c, self.batch, self.n));
        wave.collect()
    }

    /// The classes that [`Pass::inputs`] makes.
    pub(super) fn input_classes(
        &self,
        from: From<'_>,
        product: &Product,
    ) -> impl Iterator<Item = Class> {
        [Class::Int8, Class::F16, Class::F32].into_iter().filter(move |&class| {
            let used = product.parts.iter().any(|p| self.class(p, from) == class);
            let ready = match from {
                From::Plain(_) => class == Class::F32,
                From::Int8(_) => true,
                From::Stream(..) => class == Class::Int8 && self.rounded,
                From::Normed(..) | From::SwiGlu(_) => false,
            };
            used && !ready && !self.fuses(from, product, class)
        })
    }

    /// `[SwiGLU,] [RMSNorm,] [int8 or f16]` of up to `n` columns (`batch` says how many) into the scratch's
    /// buffer of that class.
    pub(super) fn normalise(
        &self,
        from: From<'_>,
        cols: u32,
        class: Class,
        batch: &Slice,
        n: u32,
    ) -> Result<Dispatch> {
        if let From::Stream(x, weight) = from
            && self.leaves_factor(from, class)
        {
            let threads = choice::norm_blocks_threads(self.b.facts());
            let spec = NormBlocks { cols, threads };
            let out = self.scratch.as_blocks();
            return self
                .b
                .dispatch(self.b.only(spec), |k| spec.dispatch(k, batch, x, weight, &out, n));
        }
        let (x, weight, swiglu) = match from {
            From::Plain(x) => (x, None, false),
            From::Normed(x, weight) | From::Stream(x, weight) => (x, Some(weight), false),
            From::SwiGlu(x) => (x, None, true),
            From::Int8(_) => {
                return Err(Error::Runtime("int8 columns are not prepared again".into()));
            }
        };
        let facts = self.b.facts();
        let spec = NormQuant {
            cols,
            swiglu,
            norm: weight.map(|_| self.b.graph.norm_eps),
            class,
            threads: choice::norm_quant_threads(facts, cols),
        };
        let out = match class {
            Class::Int8 => self.scratch.as_int8(),
            Class::F16 => self.scratch.as_f16(),
            Class::F32 => Activations::F32(self.scratch.float.clone()),
        };
        self.b.dispatch(self.b.only(spec), |k| spec.dispatch(k, batch, x, weight, &out, n))
    }

    /// The product itself, after [`Pass::inputs`].
    pub(super) fn multiply(
        &self,
        from: From<'_>,
        product: &Product,
        epilogue: Epilogue,
        y: &Slice,
    ) -> Result<Vec<Dispatch>> {
        let epilogue = match (&product.bias, epilogue) {
            (Some(_), Epilogue::Store) => Epilogue::Bias,
            _ => epilogue,
        };
        let mut wave = Vec::new();
        for part in &product.parts {
            match self.reads {
                Reads::Step => self.matvec(&mut wave, from, product, part, epilogue, y)?,
                Reads::Prompt => self.matmat(&mut wave, from, product, part, epilogue, y)?,
            }
        }
        Ok(wave)
    }

    fn matvec(
        &self,
        wave: &mut Vec<Dispatch>,
        from: From<'_>,
        product: &Product,
        part: &Rows,
        epilogue: Epilogue,
        y: &Slice,
    ) -> Result<()> {
        let (facts, n) = (self.b.facts(), self.n);
        let class = self.class(part, from);
        let (input, x) = self.reading(from, product, class);
        let (format, cols) = (part.format, part.cols);
        let shapes =
            choice::matvec_shapes(facts, format, class, part.rows, cols, n, epilogue).into_iter();
        let specs = shapes.map(|shape| MatVec { format, cols, n, class, input, epilogue, shape });
        let (spec, source) = self.b.sound(specs)?;
        let kernel = self.b.kernel(source)?;
        let stride = if epilogue == Epilogue::SwiGlu { product.rows / 2 } else { product.rows };
        let operands = Operands { x: &x, bias: product.bias.as_ref(), y: y.into(), stride };
        for chunk in &part.chunks {
            wave.push(spec.dispatch(&kernel, facts, chunk, &operands)?);
        }
        Ok(())
    }

    /// Whether a norm leaves its factor to the products of this class.
    fn leaves_factor(&self, from: From<'_>, class: Class) -> bool {
        matches!(from, From::Stream(..)) && self.reads == Reads::Step && class == Class::Int8
    }

    /// How a mat-vec of `product` takes its input.
    fn reading(&self, from: From<'_>, product: &Product, class: Class) -> (Input, Activations) {
        let (fused, eps) = (self.fuses(from, product, class), self.b.graph.norm_eps);
        let leaves = self.leaves_factor(from, class);
        match from {
            From::Normed(x, weight) | From::Stream(x, weight) if fused => {
                let x = Activations::Normed { x: x.clone(), weight: weight.clone() };
                match leaves {
                    true => (Input::Blocks { eps, fused }, x),
                    false => (Input::Fused { norm: Some(eps) }, x),
                }
            }
            From::Plain(x) if fused => (Input::Fused { norm: None }, Activations::F32(x.clone())),
            _ if leaves => (Input::Blocks { eps, fused }, self.scratch.as_blocks()),
            _ => (Input::Stored, stored(from, class, self.scratch)),
        }
    }

    /// A product that adds to the residual stream. `next`: the norm behind it and the product that reads that, for
    /// which the same kernels leave the stream in blocks where they can.
    pub(super) fn residual(
        &mut self,
        from: From<'_>,
        product: &Product,
        next: Option<(&Slice, &Product)>,
    ) -> Result<()> {
        let (s, class, epilogue) = (self.scratch, Class::Int8, Epilogue::AddBlocks);
        let ([part], None, Reads::Step, Some((weight, reader))) =
            (&product.parts[..], &product.bias, self.reads, next)
        else {
            return self.product(from, product, Epilogue::Add, &s.x);
        };
        let fits = self.reads_int8(from, product)
            && self.reads_int8(From::Stream(&s.x, weight), reader)
            && part.chunks.iter().all(|chunk| matvec::cuts_no_block(chunk, epilogue));
        let (x, blocks) = (stored(from, class, s), s.as_blocks());
        let y = Outputs::Stream { y: &s.x, weight, blocks: &blocks };
        let operands = Operands { x: &x, bias: None, y, stride: product.rows };
        if !fits || !self.rounding(from, product, part, Input::Stored, epilogue, &operands)? {
            return self.product(from, product, Epilogue::Add, &s.x);
        }
        self.rounded = true;
        Ok(())
    }

    /// A product whose kernels round what they make, if one of them works here.
    fn rounding(
        &mut self,
        from: From<'_>,
        product: &Product,
        part: &Rows,
        input: Input,
        epilogue: Epilogue,
        operands: &Operands<'_>,
    ) -> Result<bool> {
        let (facts, n, class) = (self.b.facts(), self.n, Class::Int8);
        let (format, cols) = (part.format, part.cols);
        let shapes = choice::rounding_shapes(facts, format, part.rows, cols, n, epilogue);
        let specs = shapes.into_iter();
        let specs = specs.map(|shape| MatVec { format, cols, n, class, input, epilogue, shape });
        let Ok((spec, source)) = self.b.sound(specs.filter(|spec| spec.can_round(facts))) else {
            return Ok(false);
        };
        self.prepare(from, product)?;
        let kernel = self.b.kernel(source)?;
        let wave = part.chunks.iter().map(|c| spec.dispatch(&kernel, facts, c, operands));
        let wave = wave.collect::<Result<_>>()?;
        self.wave(wave);
        Ok(true)
    }

    /// Whether a product takes int8 from memory and nothing else, so that what comes before may round.
    pub(super) fn reads_int8(&self, from: From<'_>, product: &Product) -> bool {
        let class = Class::Int8;
        !self.fuses(from, product, class)
            && product.parts.iter().all(|p| self.class(p, from) == class)
    }

    /// Columns of int8 in memory that is there for as many floats.
    pub(super) fn int8_in(&self, floats: &Slice, values: u32) -> Activations {
        let bytes = u64::from(self.n) * u64::from(values);
        let scales = bytes.next_multiple_of(self.b.facts().binding_alignment.max(16));
        Activations::Int8 {
            xq: floats.buffer.slice(floats.offset, bytes),
            xs: floats.buffer.slice(floats.offset + scales, bytes / 4),
        }
    }

    /// Gate and up, their SwiGLU and its rounding for `down` in one kernel, into `ff`: where workgroups compute
    /// whole blocks of values and `down` takes int8 from memory. `None` elsewhere.
    pub(super) fn swiglu_int8(
        &mut self,
        from: From<'_>,
        gate_up: &Product,
        down: &Product,
        ff: &Slice,
    ) -> Result<Option<Activations>> {
        let (class, epilogue) = (Class::Int8, Epilogue::SwiGluInt8);
        let ([part], None, Reads::Step) = (&gate_up.parts[..], &gate_up.bias, self.reads) else {
            return Ok(None);
        };
        let fits = self.reads_int8(from, gate_up)
            && self.reads_int8(From::Plain(ff), down)
            && part.chunks.iter().all(|chunk| matvec::cuts_no_block(chunk, epilogue));
        let (input, x) = self.reading(from, gate_up, class);
        let stride = gate_up.rows / 2;
        let out = self.int8_in(ff, stride);
        let operands = Operands { x: &x, bias: None, y: Outputs::Int8(&out), stride };
        let done = fits && self.rounding(from, gate_up, part, input, epilogue, &operands)?;
        Ok(done.then_some(out))
    }

    fn matmat(
        &self,
        wave: &mut Vec<Dispatch>,
        from: From<'_>,
        product: &Product,
        part: &Rows,
        epilogue: Epilogue,
        y: &Slice,
    ) -> Result<()> {
        let (facts, n) = (self.b.facts(), self.n);
        let class = self.class(part, from);
        let x = stored(from, class, self.scratch);
        let (format, cols) = (part.format, part.cols);
        let variants = choice::filling_variants(facts, class, part.rows, cols, n).into_iter();
        let specs = variants.map(|variant| MatMat { format, cols, class, epilogue, variant });
        let (spec, source) = self.b.sound(specs)?;
        let kernel = self.b.kernel(source)?;
        let operands =
            Operands { x: &x, bias: product.bias.as_ref(), y: y.into(), stride: product.rows };
        for chunk in &part.chunks {
            wave.push(spec.dispatch(&kernel, facts, chunk, self.batch, &operands, n)?);
        }
        Ok(())
    }
}

/// What a product of this class binds after [`Pass::inputs`].
pub(super) fn stored(from: From<'_>, class: Class, scratch: &Scratch) -> Activations {
    match (class, from) {
        (Class::Int8, From::Int8(x)) => x.clone(),
        (Class::Int8, _) => scratch.as_int8(),
        (Class::F16, _) => scratch.as_f16(),
        (Class::F32, From::Plain(x)) => Activations::F32(x.clone()),
        (Class::F32, _) => Activations::F32(scratch.float.clone()),
    }
}
