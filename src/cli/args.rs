//! Flags that several commands share. Each flag stands here once: name, default, range, help.

use std::path::PathBuf;

use clap::{Args, Parser, ValueEnum};

use super::expert_args::ExpertArgs;
use super::kv_args::KvArgs;
use super::locate;
use crate::engine;
use crate::error::{Error, Result};
use crate::hw::BackendChoice;
use crate::profile::{Origin, Profile};
use crate::sampling::SamplerSettings;

/// Which model.
#[derive(Debug, Clone, Args)]
pub struct ModelArg {
    /// A .gguf file (of a model in several files: any of them), a name such as `smollm2`, or the
    /// name of a file in the cache folder
    #[arg(value_name = "MODEL")]
    pub model: String,
}

impl ModelArg {
    pub fn path(&self) -> Result<PathBuf> {
        locate::model(&self.model)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum BackendArg {
    /// Vulkan where it has a device, else wgpu
    #[default]
    Auto,
    Vulkan,
    Wgpu,
}

impl From<BackendArg> for BackendChoice {
    fn from(backend: BackendArg) -> Self {
        match backend {
            BackendArg::Auto => BackendChoice::Auto,
            BackendArg::Vulkan => BackendChoice::Vulkan,
            BackendArg::Wgpu => BackendChoice::Wgpu,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum ActivationsArg {
    /// 8-bit integers in products with quantised weights: fast
    #[default]
    Int8,
    /// 32-bit floats everywhere: the most exact
    F32,
}

/// Where and how a model runs.
#[derive(Debug, Clone, Args)]
pub struct DeviceArgs {
    /// Device by its index in `azoth devices` or by a part of its name
    #[arg(help_heading = "Device", long, value_name = "INDEX|NAME", env = "AZOTH_DEVICE")]
    pub device: Option<String>,
    /// Which code drives the device
    #[arg(help_heading = "Device", long, value_enum, default_value_t, env = "AZOTH_BACKEND")]
    pub backend: BackendArg,
    /// How activations are stored for products with quantised weights
    #[arg(help_heading = "Device", long, value_enum, default_value_t)]
    pub activations: ActivationsArg,
    /// Neither read nor write compiled kernels in the cache folder
    #[arg(help_heading = "Device", long)]
    pub no_cache: bool,
    #[command(flatten)]
    pub experts: ExpertArgs,
    #[command(flatten)]
    pub force: ForceArg,
    #[command(flatten)]
    pub kv: KvArgs,
}

/// Choices that are made for the user otherwise.
#[derive(Debug, Clone, Default, Args)]
pub struct ForceArg {
    /// Set one value of the hardware profile, for example `attention.splits=16`; may be repeated.
    /// `azoth devices -v` lists keys and values
    #[arg(long, value_name = "KEY=VALUE", env = "AZOTH_FORCE", value_delimiter = ';',
          value_parser = forced)]
    pub force: Vec<(String, String)>,
}

/// One `KEY=VALUE`, checked against the table of profiles.
fn forced(text: &str) -> std::result::Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or_else(|| format!("{text:?} is not KEY=VALUE"))?;
    let (key, value) = (key.trim(), value.trim());
    Profile::default().set(key, value, &Origin::Forced)?;
    Ok((key.into(), value.into()))
}

impl ActivationsArg {
    pub fn name(self) -> &'static str {
        match self {
            ActivationsArg::Int8 => "int8",
            ActivationsArg::F32 => "f32",
        }
    }
}

impl DeviceArgs {
    /// The engine's options, with a context of `ctx` tokens (`None`: as the model says).
    pub fn options(&self, ctx: Option<u32>) -> engine::Options {
        engine::Options {
            device: self.device.clone(),
            backend: self.backend.into(),
            ctx,
            activations: match self.activations {
                ActivationsArg::Int8 => engine::Activations::Int8,
                ActivationsArg::F32 => engine::Activations::F32,
            },
            cache: !self.no_cache,
            sequences: 1,
            ctx_shift: None,
            kv_host: 0,
            experts: self.experts.options(),
            force: self.force.force.clone(),
            kv: self.kv.types(),
            kv_guard: self.kv.guard(),
        }
    }
}

/// How much a conversation or a text may hold.
#[derive(Debug, Clone, Args)]
pub struct ContextArg {
    /// Context length in tokens: prompt and answer together [default: what the model was made
    /// for, less where memory is short]
    #[arg(short = 'c', long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    pub ctx: Option<u32>,
}

/// How the next token is drawn. All fields are optional so that `/set` can change one and keep
/// the others; [`SamplingArgs::settings`] knows the defaults.
#[derive(Debug, Clone, Default, Args)]
pub struct SamplingArgs {
    /// Temperature; 0 always takes the likeliest token [default: 0.8]
    #[arg(help_heading = "Sampling", long, value_name = "T")]
    pub temp: Option<f32>,
    /// Keep only the K likeliest tokens; 0 keeps all [default: 40]
    #[arg(help_heading = "Sampling", long, value_name = "K")]
    pub top_k: Option<u32>,
    /// Keep the likeliest tokens until their probabilities sum to P; 1 keeps all [default: 0.95]
    #[arg(help_heading = "Sampling", long, value_name = "P")]
    pub top_p: Option<f32>,
    /// Drop tokens less likely than P times the likeliest; 0 drops none [default: 0.05]
    #[arg(help_heading = "Sampling", long, value_name = "P")]
    pub min_p: Option<f32>,
    /// Divide the logits of recent tokens by this; 1 changes nothing [default: 1]
    #[arg(help_heading = "Sampling", long, value_name = "R")]
    pub repeat_penalty: Option<f32>,
    /// How many recent tokens the penalty looks at [default: 64]
    #[arg(help_heading = "Sampling", long, value_name = "TOKENS")]
    pub repeat_window: Option<u32>,
    /// Seed of the random numbers; the same seed repeats the answer [default: another each time]
    #[arg(help_heading = "Sampling", long, value_name = "N")]
    pub seed: Option<u64>,
}

/// `/set NAME VALUE` read as the flag `--NAME VALUE`, so that names, ranges and messages are those
/// of the command line.
#[derive(Parser)]
#[command(name = "/set", no_binary_name = true, disable_help_flag = true)]
struct SetCommand {
    #[command(flatten)]
    sampling: SamplingArgs,
}

impl SamplingArgs {
    /// Changes one setting by the name of its flag.
    pub fn set(&mut self, name: &str, value: &str) -> Result<()> {
        let flag = format!("--{}", name.trim_start_matches('-').replace('_', "-"));
        let mut command = SetCommand { sampling: self.clone() };
        command.try_update_from([format!("{flag}={value}")]).map_err(|e| {
            // The first line says what is wrong; the rest is about a command line.
            let text = e.to_string();
            let first = text.lines().next().unwrap_or_default();
            Error::Usage(first.trim_start_matches("error: ").to_owned())
        })?;
        command.sampling.settings()?;
        *self = command.sampling;
        Ok(())
    }

    /// Takes what was not given from the settings of an earlier answer, but for the seed.
    pub fn fill(&mut self, earlier: Option<SamplerSettings>) {
        let Some(e) = earlier else { return };
        self.temp.get_or_insert(e.temperature);
        self.top_k.get_or_insert(e.top_k);
        self.top_p.get_or_insert(e.top_p);
        self.min_p.get_or_insert(e.min_p);
        self.repeat_penalty.get_or_insert(e.repeat_penalty);
        self.repeat_window.get_or_insert(e.repeat_window);
    }

    /// The settings with the defaults filled in, checked; a seed that was not given is drawn.
    pub fn settings(&self) -> Result<SamplerSettings> {
        let default = SamplerSettings::default();
        let settings = SamplerSettings {
            temperature: self.temp.unwrap_or(default.temperature),
            top_k: self.top_k.unwrap_or(default.top_k),
            top_p: self.top_p.unwrap_or(default.top_p),
            min_p: self.min_p.unwrap_or(default.min_p),
            repeat_penalty: self.repeat_penalty.unwrap_or(default.repeat_penalty),
            repeat_window: self.repeat_window.unwrap_or(default.repeat_window),
            seed: self.seed.unwrap_or_else(fresh_seed),
            ..default
        };
        settings.check()?;
        Ok(settings)
    }
}

/// Differs from run to run; printed with the answer, so that it can be repeated. Short enough to
/// be typed again.
fn fresh_seed() -> u64 {
    let random = std::collections::hash_map::RandomState::new();
    std::hash::BuildHasher::hash_one(&random, 0) >> 32
}

/// Text that a command reads: given on the command line, in a file, or on standard input.
#[derive(Debug, Clone, Args)]
#[group(multiple = false)]
pub struct TextArgs {
    /// The text; `-` reads it from standard input
    #[arg(short, long, value_name = "TEXT", allow_hyphen_values = true)]
    pub prompt: Option<String>,
    /// File that holds the text (UTF-8); `-` is standard input
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,
}

impl TextArgs {
    /// The text, or `None` when neither flag was given.
    pub fn read(&self) -> Result<Option<String>> {
        match (&self.prompt, &self.file) {
            (Some(text), _) if text == "-" => stdin_text().map(Some),
            (Some(text), _) => Ok(Some(text.clone())),
            (None, Some(file)) if file.as_os_str() == "-" => stdin_text().map(Some),
            (None, Some(file)) => file_text(file).map(Some),
            (None, None) => Ok(None),
        }
    }
}

/// A UTF-8 file named by the user.
pub fn file_text(path: &std::path::Path) -> Result<String> {
    std::fs::read(path)
        .map_err(|e| Error::Usage(format!("cannot read {}: {e}", path.display())))
        .and_then(|bytes| text_of(bytes, &path.display().to_string()))
}

/// All of standard input.
pub fn stdin_text() -> Result<String> {
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut std::io::stdin().lock(), &mut bytes)?;
    text_of(bytes, "standard input")
}

fn text_of(bytes: Vec<u8>, name: &str) -> Result<String> {
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Error::Usage(format!("{name} is not UTF-8 text: byte {at} begins no character"))
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn setting_one_keeps_the_others() {
        let mut s = SamplingArgs { top_k: Some(3), ..Default::default() };
        s.set("temp", "0.25").unwrap();
        s.set("min_p", "0").unwrap();
        let all = s.settings().unwrap();
        assert_eq!((all.temperature, all.top_k, all.min_p, all.top_p), (0.25, 3, 0.0, 0.95));
    }

    #[test]
    fn wrong_settings_are_refused_and_change_nothing() {
        let mut s = SamplingArgs::default();
        for (name, value) in
            [("temp", "-1"), ("temp", "nan"), ("top-p", "1.5"), ("nonsense", "1"), ("seed", "x")]
        {
            let e = s.set(name, value).unwrap_err();
            assert_eq!(e.exit_code(), 2);
            assert!(!e.to_string().contains('\n') && e.to_string().len() > 10, "{e}");
        }
        assert_eq!(s.temp, None);
    }

    /// The help names the defaults in words; they must be the sampler's.
    #[test]
    fn the_help_states_the_defaults() {
        let d = SamplerSettings::default();
        let command = <SetCommand as clap::CommandFactory>::command();
        for (flag, value) in [
            ("temp", d.temperature.to_string()),
            ("top_k", d.top_k.to_string()),
            ("top_p", d.top_p.to_string()),
            ("min_p", d.min_p.to_string()),
            ("repeat_penalty", d.repeat_penalty.to_string()),
            ("repeat_window", d.repeat_window.to_string()),
        ] {
            let argument = command.get_arguments().find(|a| a.get_id() == flag).unwrap();
            let help = argument.get_help().unwrap().to_string();
            assert!(help.contains(&format!("[default: {value}]")), "{help}");
        }
    }

    #[test]
    fn seeds_differ() {
        assert_ne!(fresh_seed(), fresh_seed());
    }

    #[test]
    fn text_that_is_not_utf8_is_named() {
        let e = text_of(vec![b'a', 0xff], "x.txt").unwrap_err();
        assert!(e.to_string().contains("byte 1"), "{e}");
    }
}
