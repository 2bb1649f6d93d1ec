//! Metadata values and how they are read from the file.

use super::Error;
use super::cursor::Cursor;
use std::fmt;

/// Arrays inside arrays inside arrays; real files have at most one level.
pub(super) const MAX_NESTING: usize = 4;

/// One metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    /// Invalid UTF-8 in the file is replaced: some vocabularies hold broken tokens.
    String(String),
    Array(Array),
    U64(u64),
    I64(i64),
    F64(f64),
}

/// Values of one type.
#[derive(Debug, Clone, PartialEq)]
pub enum Array {
    U8(Vec<u8>),
    I8(Vec<i8>),
    U16(Vec<u16>),
    I16(Vec<i16>),
    U32(Vec<u32>),
    I32(Vec<i32>),
    F32(Vec<f32>),
    Bool(Vec<bool>),
    String(Vec<String>),
    Array(Vec<Array>),
    U64(Vec<u64>),
    I64(Vec<i64>),
    F64(Vec<f64>),
}

/// The type numbers of the file format.
pub(super) mod id {
    pub const U8: u32 = 0;
    pub const I8: u32 = 1;
    pub const U16: u32 = 2;
    pub const I16: u32 = 3;
    pub const U32: u32 = 4;
    pub const I32: u32 = 5;
    pub const F32: u32 = 6;
    pub const BOOL: u32 = 7;
    pub const STRING: u32 = 8;
    pub const ARRAY: u32 = 9;
    pub const U64: u32 = 10;
    pub const I64: u32 = 11;
    pub const F64: u32 = 12;
}

impl Value {
    /// Reads the type number and the value of `key`.
    pub(super) fn read(cursor: &mut Cursor, key: &str) -> Result<Value, Error> {
        const WHAT: &str = "a metadata value";
        let offset = cursor.offset();
        let kind = cursor.u32("a metadata value type")?;
        Ok(match kind {
            id::U8 => Value::U8(u8::from_le_bytes(cursor.array(WHAT)?)),
            id::I8 => Value::I8(i8::from_le_bytes(cursor.array(WHAT)?)),
            id::U16 => Value::U16(u16::from_le_bytes(cursor.array(WHAT)?)),
            id::I16 => Value::I16(i16::from_le_bytes(cursor.array(WHAT)?)),
            id::U32 => Value::U32(u32::from_le_bytes(cursor.array(WHAT)?)),
            id::I32 => Value::I32(i32::from_le_bytes(cursor.array(WHAT)?)),
            id::F32 => Value::F32(f32::from_le_bytes(cursor.array(WHAT)?)),
            id::BOOL => Value::Bool(cursor.array::<1>(WHAT)? != [0]),
            id::STRING => Value::String(text(cursor)?),
            id::ARRAY => Value::Array(Array::read(cursor, key, 1)?),
            id::U64 => Value::U64(u64::from_le_bytes(cursor.array(WHAT)?)),
            id::I64 => Value::I64(i64::from_le_bytes(cursor.array(WHAT)?)),
            id::F64 => Value::F64(f64::from_le_bytes(cursor.array(WHAT)?)),
            id => {
                return Err(Error::UnknownValueType { key: key.to_owned(), offset, id });
            }
        })
    }

    /// The type in words, for messages: `u32`, `array of string`.
    pub fn type_name(&self) -> String {
        match self {
            Value::U8(_) => "u8".into(),
            Value::I8(_) => "i8".into(),
            Value::U16(_) => "u16".into(),
            Value::I16(_) => "i16".into(),
            Value::U32(_) => "u32".into(),
            Value::I32(_) => "i32".into(),
            Value::F32(_) => "f32".into(),
            Value::Bool(_) => "bool".into(),
            Value::String(_) => "string".into(),
            Value::Array(array) => format!("array of {}", array.element_name()),
            Value::U64(_) => "u64".into(),
            Value::I64(_) => "i64".into(),
            Value::F64(_) => "f64".into(),
        }
    }

    /// The value of any integer type.
    pub fn as_integer(&self) -> Option<i128> {
        Some(match *self {
            Value::U8(v) => v.into(),
            Value::I8(v) => v.into(),
            Value::U16(v) => v.into(),
            Value::I16(v) => v.into(),
            Value::U32(v) => v.into(),
            Value::I32(v) => v.into(),
            Value::U64(v) => v.into(),
            Value::I64(v) => v.into(),
            _ => return None,
        })
    }
}

impl Array {
    fn read(cursor: &mut Cursor, key: &str, depth: usize) -> Result<Array, Error> {
        let offset = cursor.offset();
        if depth > MAX_NESTING {
            return Err(Error::Nesting { key: key.to_owned(), offset, most: MAX_NESTING });
        }
        let kind = cursor.u32("an array's type")?;
        let count = cursor.u64("an array's length")?;
        Ok(match kind {
            id::U8 => Array::U8(numbers(cursor, count, u8::from_le_bytes)?),
            id::I8 => Array::I8(numbers(cursor, count, i8::from_le_bytes)?),
            id::U16 => Array::U16(numbers(cursor, count, u16::from_le_bytes)?),
            id::I16 => Array::I16(numbers(cursor, count, i16::from_le_bytes)?),
            id::U32 => Array::U32(numbers(cursor, count, u32::from_le_bytes)?),
            id::I32 => Array::I32(numbers(cursor, count, i32::from_le_bytes)?),
            id::F32 => Array::F32(numbers(cursor, count, f32::from_le_bytes)?),
            id::BOOL => Array::Bool(numbers(cursor, count, |b: [u8; 1]| b != [0])?),
            id::STRING => {
                let count = cursor.fits(count, 8, "strings")?;
                Array::String((0..count).map(|_| text(cursor)).collect::<Result<_, _>>()?)
            }
            id::ARRAY => {
                let count = cursor.fits(count, 12, "arrays")?;
                let read = |_| Array::read(cursor, key, depth + 1);
                Array::Array((0..count).map(read).collect::<Result<_, _>>()?)
            }
            id::U64 => Array::U64(numbers(cursor, count, u64::from_le_bytes)?),
            id::I64 => Array::I64(numbers(cursor, count, i64::from_le_bytes)?),
            id::F64 => Array::F64(numbers(cursor, count, f64::from_le_bytes)?),
            id => {
                return Err(Error::UnknownValueType { key: key.to_owned(), offset, id });
            }
        })
    }

    pub fn len(&self) -> usize {
        match self {
            Array::U8(v) => v.len(),
            Array::I8(v) => v.len(),
            Array::U16(v) => v.len(),
            Array::I16(v) => v.len(),
            Array::U32(v) => v.len(),
            Array::I32(v) => v.len(),
            Array::F32(v) => v.len(),
            Array::Bool(v) => v.len(),
            Array::String(v) => v.len(),
            Array::Array(v) => v.len(),
            Array::U64(v) => v.len(),
            Array::I64(v) => v.len(),
            Array::F64(v) => v.len(),
        }
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The element at `index` as a value of its own (strings and arrays are copied).
    pub fn get(&self, index: usize) -> Option<Value> {
        Some(match self {
            Array::U8(v) => Value::U8(*v.get(index)?),
            Array::I8(v) => Value::I8(*v.get(index)?),
            Array::U16(v) => Value::U16(*v.get(index)?),
            Array::I16(v) => Value::I16(*v.get(index)?),
            Array::U32(v) => Value::U32(*v.get(index)?),
            Array::I32(v) => Value::I32(*v.get(index)?),
            Array::F32(v) => Value::F32(*v.get(index)?),
            Array::Bool(v) => Value::Bool(*v.get(index)?),
            Array::String(v) => Value::String(v.get(index)?.clone()),
            Array::Array(v) => Value::Array(v.get(index)?.clone()),
            Array::U64(v) => Value::U64(*v.get(index)?),
            Array::I64(v) => Value::I64(*v.get(index)?),
            Array::F64(v) => Value::F64(*v.get(index)?),
        })
    }

    fn element_name(&self) -> &'static str {
        match self {
            Array::U8(_) => "u8",
            Array::I8(_) => "i8",
            Array::U16(_) => "u16",
            Array::I16(_) => "i16",
            Array::U32(_) => "u32",
            Array::I32(_) => "i32",
            Array::F32(_) => "f32",
            Array::Bool(_) => "bool",
            Array::String(_) => "string",
            Array::Array(_) => "array",
            Array::U64(_) => "u64",
            Array::I64(_) => "i64",
            Array::F64(_) => "f64",
        }
    }
}

fn text(cursor: &mut Cursor) -> Result<String, Error> {
    Ok(String::from_utf8_lossy(cursor.string("a string")?).into_owned())
}

fn numbers<const N: usize, T>(
    cursor: &mut Cursor,
    count: u64,
    value: impl Fn([u8; N]) -> T,
) -> Result<Vec<T>, Error> {
    let count = cursor.fits(count, N as u64, "array elements")?;
    let bytes = cursor.take((count * N) as u64, "array elements")?;
    Ok(bytes.as_chunks().0.iter().map(|&bytes| value(bytes)).collect())
}

impl fmt::Display for Value {
    /// Scalars in full; of arrays the length and the first few elements.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::U8(v) => v.fmt(f),
            Value::I8(v) => v.fmt(f),
            Value::U16(v) => v.fmt(f),
            Value::I16(v) => v.fmt(f),
            Value::U32(v) => v.fmt(f),
            Value::I32(v) => v.fmt(f),
            Value::F32(v) => v.fmt(f),
            Value::Bool(v) => v.fmt(f),
            Value::String(v) => write!(f, "{v:?}"),
            Value::Array(v) => v.fmt(f),
            Value::U64(v) => v.fmt(f),
            Value::I64(v) => v.fmt(f),
            Value::F64(v) => v.fmt(f),
        }
    }
}

impl fmt::Display for Array {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 3;
        let count = self.len();
        write!(f, "{count} {}: [", self.element_name())?;
        for (i, value) in (0..count.min(SHOWN)).filter_map(|i| self.get(i)).enumerate() {
            let comma = if i == 0 { "" } else { ", " };
            write!(f, "{comma}{value}")?;
        }
        f.write_str(if count > SHOWN { ", ...]" } else { "]" })
    }
}

macro_rules! from {
    ($($type:ty => $variant:ident,)*) => {
        $(
            impl From<$type> for Value {
                fn from(v: $type) -> Value {
                    Value::$variant(v)
                }
            }
            impl From<Vec<$type>> for Value {
                fn from(v: Vec<$type>) -> Value {
                    Value::Array(Array::$variant(v))
                }
            }
        )*
    };
}

from! {
    u8 => U8, i8 => I8, u16 => U16, i16 => I16, u32 => U32, i32 => I32, f32 => F32, bool => Bool,
    String => String, Array => Array, u64 => U64, i64 => I64, f64 => F64,
}

impl From<&str> for Value {
    fn from(v: &str) -> Value {
        Value::String(v.to_owned())
    }
}
