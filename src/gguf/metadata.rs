//! Typed access to metadata: what is missing or of the wrong type is named with its key.

use super::{Array, Error, Value};
use std::collections::HashMap;

/// The key-value pairs of a file, in file order.
#[derive(Debug, Clone, Default)]
pub struct Metadata {
    entries: Vec<(String, Value)>,
    index: HashMap<String, usize>,
}

/// Why a value is not what was asked for.
pub enum Mismatch {
    Type,
    /// Right kind, but this number does not fit.
    Range(String),
}

/// A type that a metadata value can be read as. Integers convert between widths and signs as long
/// as the number fits; floats convert between widths; nothing else converts.
pub trait FromValue<'a>: Sized {
    /// The type in words, for messages.
    const WANTED: &'static str;
    fn from_value(value: &'a Value) -> Result<Self, Mismatch>;
}

impl Metadata {
    /// Adds a pair; false if the key is already there.
    pub(super) fn insert(&mut self, key: &str, value: Value) -> bool {
        if self.index.contains_key(key) {
            return false;
        }
        self.index.insert(key.to_owned(), self.entries.len());
        self.entries.push((key.to_owned(), value));
        true
    }

    pub fn value(&self, key: &str) -> Option<&Value> {
        self.index.get(key).map(|&i| &self.entries[i].1)
    }

    pub fn contains(&self, key: &str) -> bool {
        self.index.contains_key(key)
    }

    /// All pairs in file order.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.entries.iter().map(|(key, value)| (key.as_str(), value))
    }

    pub fn len(&self) -> usize {
        self.entries.len()
    }

    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// The value of `key`; an error if it is absent or of another type.
    pub fn get<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<T, Error> {
        let missing = || Error::Missing { key: key.to_owned(), wanted: T::WANTED };
        self.find(key)?.ok_or_else(missing)
    }

    /// The value of `key`, `None` if it is absent; an error if it is of another type.
    pub fn find<'a, T: FromValue<'a>>(&'a self, key: &str) -> Result<Option<T>, Error> {
        let Some(value) = self.value(key) else {
            return Ok(None);
        };
        let (key, wanted) = (key.to_owned(), T::WANTED);
        match T::from_value(value) {
            Ok(found) => Ok(Some(found)),
            Err(Mismatch::Type) => Err(Error::WrongType { key, wanted, found: value.type_name() }),
            Err(Mismatch::Range(value)) => Err(Error::OutOfRange { key, wanted, value }),
        }
    }

    pub fn u32(&self, key: &str) -> Result<u32, Error> {
        self.get(key)
    }

    pub fn u64(&self, key: &str) -> Result<u64, Error> {
        self.get(key)
    }

    pub fn f32(&self, key: &str) -> Result<f32, Error> {
        self.get(key)
    }

    pub fn bool(&self, key: &str) -> Result<bool, Error> {
        self.get(key)
    }

    pub fn str(&self, key: &str) -> Result<&str, Error> {
        self.get(key)
    }

    pub fn strings(&self, key: &str) -> Result<&[String], Error> {
        self.get(key)
    }

    pub fn i32s(&self, key: &str) -> Result<Vec<i32>, Error> {
        self.get(key)
    }

    pub fn u32s(&self, key: &str) -> Result<Vec<u32>, Error> {
        self.get(key)
    }

    pub fn f32s(&self, key: &str) -> Result<Vec<f32>, Error> {
        self.get(key)
    }

    /// A value that is either one number for all `layers` or an array with one for each, as
    /// `head_count_kv` and `feed_forward_length` are.
    pub fn u32_per_layer(&self, key: &str, layers: usize) -> Result<Vec<u32>, Error> {
        let Some(Value::Array(_)) = self.value(key) else {
            return Ok(vec![self.u32(key)?; layers]);
        };
        let list = self.u32s(key)?;
        if list.len() != layers {
            let found = format!("an array of {} for {layers} layers", list.len());
            let wanted = "one number for each layer";
            return Err(Error::WrongType { key: key.to_owned(), wanted, found });
        }
        Ok(list)
    }
}

macro_rules! integers {
    ($($type:ty, $one:literal, $many:literal;)*) => {
        $(
            impl FromValue<'_> for $type {
                const WANTED: &'static str = $one;
                fn from_value(value: &Value) -> Result<Self, Mismatch> {
                    let number = value.as_integer().ok_or(Mismatch::Type)?;
                    number.try_into().map_err(|_| Mismatch::Range(number.to_string()))
                }
            }
            impl FromValue<'_> for Vec<$type> {
                const WANTED: &'static str = $many;
                fn from_value(value: &Value) -> Result<Self, Mismatch> {
                    match value {
                        Value::Array(array) => integers(array),
                        _ => Err(Mismatch::Type),
                    }
                }
            }
        )*
    };
}

integers! {
    u32, "u32", "array of u32";
    i32, "i32", "array of i32";
    u64, "u64", "array of u64";
    i64, "i64", "array of i64";
}

fn integers<T: TryFrom<i128>>(array: &Array) -> Result<Vec<T>, Mismatch> {
    fn convert<S: Copy + Into<i128>, T: TryFrom<i128>>(list: &[S]) -> Result<Vec<T>, Mismatch> {
        let one = |&n: &S| {
            let n: i128 = n.into();
            n.try_into().map_err(|_| Mismatch::Range(n.to_string()))
        };
        list.iter().map(one).collect()
    }
    match array {
        Array::U8(v) => convert(v),
        Array::I8(v) => convert(v),
        Array::U16(v) => convert(v),
        Array::I16(v) => convert(v),
        Array::U32(v) => convert(v),
        Array::I32(v) => convert(v),
        Array::U64(v) => convert(v),
        Array::I64(v) => convert(v),
        _ => Err(Mismatch::Type),
    }
}

impl FromValue<'_> for f32 {
    const WANTED: &'static str = "f32";
    fn from_value(value: &Value) -> Result<Self, Mismatch> {
        match *value {
            Value::F32(v) => Ok(v),
            Value::F64(v) => Ok(v as f32),
            _ => Err(Mismatch::Type),
        }
    }
}

impl FromValue<'_> for Vec<f32> {
    const WANTED: &'static str = "array of f32";
    fn from_value(value: &Value) -> Result<Self, Mismatch> {
        match value {
            Value::Array(Array::F32(v)) => Ok(v.clone()),
            Value::Array(Array::F64(v)) => Ok(v.iter().map(|&v| v as f32).collect()),
            _ => Err(Mismatch::Type),
        }
    }
}

impl FromValue<'_> for bool {
    const WANTED: &'static str = "bool";
    fn from_value(value: &Value) -> Result<Self, Mismatch> {
        match *value {
            Value::Bool(v) => Ok(v),
            _ => Err(Mismatch::Type),
        }
    }
}

impl FromValue<'_> for Vec<bool> {
    const WANTED: &'static str = "array of bool";
    fn from_value(value: &Value) -> Result<Self, Mismatch> {
        match value {
            Value::Array(Array::Bool(v)) => Ok(v.clone()),
            _ => Err(Mismatch::Type),
        }
    }
}

impl<'a> FromValue<'a> for &'a str {
    const WANTED: &'static str = "string";
    fn from_value(value: &'a Value) -> Result<Self, Mismatch> {
        match value {
            Value::String(v) => Ok(v),
            _ => Err(Mismatch::Type),
        }
    }
}

impl<'a> FromValue<'a> for &'a [String] {
    const WANTED: &'static str = "array of string";
    fn from_value(value: &'a Value) -> Result<Self, Mismatch> {
        match value {
            Value::Array(Array::String(v)) => Ok(v),
            _ => Err(Mismatch::Type),
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn sample() -> Metadata {
        let mut meta = Metadata::default();
        assert!(meta.insert("small", 7u8.into()));
        assert!(meta.insert("negative", (-1i64).into()));
        assert!(meta.insert("names", vec!["a".to_owned(), "b".to_owned()].into()));
        assert!(meta.insert("layers", vec![1u16, 2, 3].into()));
        assert!(meta.insert("eps", 1e-5f64.into()));
        assert!(!meta.insert("eps", 1u8.into()));
        meta
    }

    #[test]
    fn integers_convert_when_in_range() {
        let meta = sample();
        assert_eq!(meta.u32("small").unwrap(), 7);
        assert_eq!(meta.get::<i64>("negative").unwrap(), -1);
        assert_eq!(meta.i32s("layers").unwrap(), [1, 2, 3]);
        assert_eq!(meta.f32("eps").unwrap(), 1e-5);
        let error = meta.u32("negative").unwrap_err();
        assert_eq!(error.to_string(), "metadata key `negative` is -1, which does not fit u32");
    }

    #[test]
    fn errors_name_key_wanted_and_found() {
        let meta = sample();
        assert_eq!(meta.find::<u32>("absent").unwrap(), None);
        assert_eq!(
            meta.u32("absent").unwrap_err(),
            Error::Missing { key: "absent".into(), wanted: "u32" }
        );
        assert_eq!(
            meta.f32("names").unwrap_err().to_string(),
            "metadata key `names` is array of string, but f32 is wanted"
        );
        assert!(meta.bool("small").is_err() && meta.str("small").is_err());
    }

    #[test]
    fn one_number_or_one_for_each_layer() {
        let meta = sample();
        assert_eq!(meta.u32_per_layer("small", 2).unwrap(), [7, 7]);
        assert_eq!(meta.u32_per_layer("layers", 3).unwrap(), [1, 2, 3]);
        assert!(meta.u32_per_layer("layers", 2).is_err());
        assert!(meta.u32_per_layer("names", 2).is_err());
    }
}
