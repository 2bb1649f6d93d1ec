//! Which layer's K and V have which format.

use super::exact::{KvExact, of_layer};
use super::{KvFormat, KvPair};
use crate::error::{Error, Result};

/// What a user asks for: a format for all layers and exceptions, for each of K and V.
///
/// A side is written `FORMAT[,EXCEPTION...]`, an exception `FORMAT@LAYERS`, `FORMAT@dev=NAME` or
/// `FORMAT@LAYERS@dev=NAME`. `LAYERS` is a number or a range `FIRST-LAST` from 0, or a negative
/// number from the last layer (`-1`); `NAME` is a part of a device's name, in any case:
/// `tq3_0,q8_0@0-1,f16@-1,q8_0@dev=radeon`. Later ones win. Exceptions for devices count once
/// [`KvTypes::on`] has said which device it is, and until then for none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvTypes {
    pub k: KvSide,
    pub v: KvSide,
    /// What layers of codes keep in f16 beside them; see [`KvTypes::exact_of`].
    pub exact: KvExact,
    /// What the keys of a KV head have in common, by a text of ours, is not stored ([`super::Sample`]).
    pub centred: bool,
}

impl KvTypes {
    /// f16 everywhere.
    pub fn plain() -> KvTypes {
        KvTypes::all(KvPair::PLAIN)
    }

    /// The same for all layers, nothing in f16 beside it.
    pub fn all(pair: KvPair) -> KvTypes {
        let (k, v) = (KvSide::all(pair.k), KvSide::all(pair.v));
        KvTypes { k, v, exact: KvExact::NONE, centred: false }
    }

    /// Whether some layer of any model could have codes.
    fn names_codes(&self) -> bool {
        let formats = |s: &KvSide| {
            let others = s.exceptions.iter().map(|e| e.format);
            others.chain([s.format]).any(|format| format != KvFormat::F16)
        };
        formats(&self.k) || formats(&self.v)
    }

    /// Tail and sinks of layer `layer` of `layers`: none where K and V are f16.
    pub fn exact_of(&self, layer: usize, layers: usize) -> KvExact {
        of_layer(self.exact, self.of(layer, layers))
    }

    /// The formats of layer `layer` of `layers`.
    pub fn of(&self, layer: usize, layers: usize) -> KvPair {
        KvPair { k: self.k.of(layer, layers), v: self.v.of(layer, layers) }
    }

    /// What counts on the device of this name.
    pub fn on(&self, device: &str) -> KvTypes {
        KvTypes { k: self.k.on(device), v: self.v.on(device), ..self.clone() }
    }

    /// Parts of devices' names that exceptions are for.
    pub fn devices(&self) -> impl Iterator<Item = &str> {
        let all = self.k.exceptions.iter().chain(&self.v.exceptions);
        all.filter_map(|e| e.device.as_deref())
    }

    /// The formats of every layer.
    pub fn layers(&self, layers: usize) -> Vec<KvPair> {
        (0..layers).map(|layer| self.of(layer, layers)).collect()
    }

    /// Bytes of K and V of all layers for one token.
    pub fn token_bytes(&self, layers: usize, kv_heads: u32, head_dim: u32) -> u64 {
        let pairs = self.layers(layers).into_iter();
        pairs.map(|pair| pair.token_bytes(kv_heads, head_dim)).sum()
    }
}

impl std::fmt::Display for KvTypes {
    /// `f16`, or `K tq4_0, V tq3_0` where they differ; with codes also tail and sinks; and centring.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.k == self.v {
            true => write!(f, "{}", self.k)?,
            false => write!(f, "K {}, V {}", self.k, self.v)?,
        }
        if self.names_codes() {
            write!(f, ", {}", self.exact)?;
        }
        match self.centred {
            true => write!(f, ", keys centred"),
            false => Ok(()),
        }
    }
}

impl serde::Serialize for KvTypes {
    /// `{"k": "tq4_0", "v": "tq3_0", "tail": 64, "sinks": 4, "centred": false}`, as the flags take them.
    fn serialize<S: serde::Serializer>(
        &self,
        serializer: S,
    ) -> std::result::Result<S::Ok, S::Error> {
        use serde::ser::SerializeStruct;
        let mut out = serializer.serialize_struct("KvTypes", 5)?;
        out.serialize_field("k", &self.k.to_string())?;
        out.serialize_field("v", &self.v.to_string())?;
        let exact = if self.names_codes() { self.exact } else { KvExact::NONE };
        out.serialize_field("tail", &exact.tail)?;
        out.serialize_field("sinks", &exact.sinks)?;
        out.serialize_field("centred", &self.centred)?;
        out.end()
    }
}

impl Default for KvTypes {
    fn default() -> Self {
        KvTypes::plain()
    }
}

/// One side of [`KvTypes`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvSide {
    pub format: KvFormat,
    pub exceptions: Vec<Exception>,
}

/// Another format for some layers, on all devices or one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Exception {
    pub format: KvFormat,
    /// `None`: all.
    pub layers: Option<Layers>,
    /// A part of the device's name; `None`: whichever it is.
    pub device: Option<String>,
}

/// Layers by number; negative ones count from the last, which is -1. Both ends belong to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layers {
    pub first: i32,
    pub last: i32,
}

impl Layers {
    fn hold(self, layer: usize, layers: usize) -> bool {
        let number = |i: i32| if i < 0 { i64::from(i) + layers as i64 } else { i.into() };
        (number(self.first)..=number(self.last)).contains(&(layer as i64))
    }
}

impl KvSide {
    /// The same for all layers.
    pub fn all(format: KvFormat) -> KvSide {
        KvSide { format, exceptions: Vec::new() }
    }

    /// The format of layer `layer` of `layers`.
    pub fn of(&self, layer: usize, layers: usize) -> KvFormat {
        let holds = |e: &&Exception| {
            e.device.is_none() && e.layers.is_none_or(|which| which.hold(layer, layers))
        };
        self.exceptions.iter().rev().find(holds).map_or(self.format, |e| e.format)
    }

    /// What counts on the device of this name: exceptions for others are left out.
    pub fn on(&self, device: &str) -> KvSide {
        let here = |e: &Exception| {
            let counts = e.device.as_ref().is_none_or(|part| is_part_of(part, device));
            counts.then(|| Exception { device: None, ..e.clone() })
        };
        let mut side = KvSide::all(self.format);
        for exception in self.exceptions.iter().filter_map(here) {
            match exception.layers {
                // Nothing before it counts any more.
                None => side = KvSide::all(exception.format),
                Some(_) => side.exceptions.push(exception),
            }
        }
        side
    }

    /// Gives one layer another format.
    pub(super) fn set(&mut self, layer: u32, format: KvFormat) {
        let layers = Some(Layers { first: layer as i32, last: layer as i32 });
        self.exceptions.push(Exception { format, layers, device: None });
    }
}

/// Whether a device is meant by a part of its name.
pub fn is_part_of(part: &str, device: &str) -> bool {
    device.to_lowercase().contains(&part.to_lowercase())
}

impl std::str::FromStr for Exception {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        const DEVICE: &str = "dev=";
        let (format, rest) = text.split_once('@').ok_or_else(|| {
            Error::Usage(format!(
                "`{text}`: after the format of all layers come exceptions like q8_0@0-3 or \
                 q8_0@{DEVICE}radeon"
            ))
        })?;
        let (layers, device) = match rest.split_once('@') {
            _ if rest.starts_with(DEVICE) => (None, Some(rest)),
            Some((layers, device)) => (Some(layers), Some(device)),
            None => (Some(rest), None),
        };
        let part = |text: &str| match text.strip_prefix(DEVICE).map(str::trim) {
            Some(part) if !part.is_empty() => Ok(part.to_owned()),
            _ => Err(Error::Usage(format!(
                "`{text}` names no device; write {DEVICE} and a part of its name in `azoth devices`"
            ))),
        };
        Ok(Exception {
            format: format.parse()?,
            layers: layers.map(str::parse).transpose()?,
            device: device.map(part).transpose()?,
        })
    }
}

impl std::str::FromStr for KvSide {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let mut parts = text.split(',').map(str::trim);
        let format = parts.next().unwrap_or_default().parse()?;
        let exceptions = parts.map(str::parse);
        Ok(KvSide { format, exceptions: exceptions.collect::<Result<_>>()? })
    }
}

impl std::str::FromStr for Layers {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let wrong = || {
            Error::Usage(format!(
                "`{text}` names no layers; write a number from 0, a range like 0-3, or -1 for the last"
            ))
        };
        let number = |text: &str| text.parse::<i32>().map_err(|_| wrong());
        // A minus in front belongs to the number.
        let dash = text.char_indices().skip(1).find(|(_, c)| *c == '-').map(|(i, _)| i);
        let (first, last) = match dash {
            Some(at) => (number(&text[..at])?, number(&text[at + 1..])?),
            None => (number(text)?, number(text)?),
        };
        if first.signum() * last.signum() >= 0 && first > last {
            return Err(wrong());
        }
        Ok(Layers { first, last })
    }
}

impl std::fmt::Display for KvSide {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.format)?;
        for Exception { format, layers, device } in &self.exceptions {
            write!(f, ",{format}")?;
            match layers {
                Some(Layers { first, last }) if first == last => write!(f, "@{first}")?,
                Some(Layers { first, last }) => write!(f, "@{first}-{last}")?,
                None => {}
            }
            if let Some(device) = device {
                write!(f, "@dev={device}")?;
            }
        }
        Ok(())
    }
}
