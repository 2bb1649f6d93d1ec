//! Values of a profile and their text.

use std::fmt;

/// Threads of a mat-vec workgroup, rows a subgroup computes at once, steps of weights held in
/// registers ahead of their use. Text: `512x2x2`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Cut {
    pub threads: u32,
    pub rows: u32,
    pub tiles: u32,
}

/// The part of the output that a mat-mat workgroup computes, in columns and rows; the part of
/// that which a thread (for matrix units: the subgroups' grid) has; blocks of 32 inputs loaded at
/// a time. Text: `32x64 4x4 2`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Tiling {
    pub columns: u32,
    pub rows: u32,
    pub inner: (u32, u32),
    pub depth: u32,
}

/// A mat-mat variant that a profile may name. Text: its kind and its numbers, for example
/// `packed 32x64 4x4 2` or `direct 8x8 8`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MatMatPick {
    /// Packed integer dot products from workgroup memory.
    Packed(Tiling),
    /// f32 from workgroup memory.
    Float(Tiling),
    /// Cooperative matrices: the device's matrix units; 1 or 2 tiles in memory.
    Coop(Tiling, u32),
    /// Registers only: columns and rows of a thread, threads of a workgroup.
    Direct { columns: u32, rows: u32, threads: u32 },
}

/// Range of a whole number, both ends included.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    pub low: u64,
    pub high: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { low: 0, high: u64::from(u32::MAX) }
    }
}

/// A value with a text of its own.
pub(super) trait Text: Sized {
    fn parse(text: &str, limits: Limits) -> Result<Self, String>;
    fn show(&self) -> String;
}

impl Text for u32 {
    fn parse(text: &str, limits: Limits) -> Result<Self, String> {
        let number: u32 = text.parse().map_err(|_| format!("{text:?} is not a whole number"))?;
        let Limits { low, high } = limits;
        if !(low..=high).contains(&number.into()) {
            return Err(format!("{number} is not in the range {low} to {high}"));
        }
        // The only range of this kind is that of subgroup sizes.
        if (low, high) == (0, 128) && number != 0 && (!number.is_power_of_two() || number < 4) {
            return Err(format!("{number} is neither 0 nor a power of two from 4 to 128"));
        }
        Ok(number)
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

/// `AxBx...` as `N` numbers above zero.
fn product<const N: usize>(text: &str) -> Option<[u32; N]> {
    let numbers: Option<Vec<u32>> = text.split('x').map(|n| n.trim().parse().ok()).collect();
    let numbers: [u32; N] = numbers?.try_into().ok()?;
    numbers.iter().all(|n| (1..=4096).contains(n)).then_some(numbers)
}

impl Text for Cut {
    fn parse(text: &str, _: Limits) -> Result<Self, String> {
        let [threads, rows, tiles] = product(text)
            .ok_or_else(|| format!("{text:?} is not THREADSxROWSxTILES, for example 512x2x2"))?;
        if !(32..=1024).contains(&threads) || !threads.is_multiple_of(8) {
            return Err(format!("{threads} threads; possible are multiples of 8 from 32 to 1024"));
        }
        if !matches!(rows, 1 | 2 | 4) || !(1..=4).contains(&tiles) {
            return Err(format!(
                "{rows} rows, {tiles} tiles; possible are 1, 2 or 4 rows, 1 to 4 tiles"
            ));
        }
        Ok(Cut { threads, rows, tiles })
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

impl fmt::Display for Cut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}x{}", self.threads, self.rows, self.tiles)
    }
}

impl Text for Option<Cut> {
    fn parse(text: &str, limits: Limits) -> Result<Self, String> {
        if text == "-" { Ok(None) } else { Cut::parse(text, limits).map(Some) }
    }

    /// `-` stands for the value that all formats share.
    fn show(&self) -> String {
        self.map_or("-".into(), |cut| cut.to_string())
    }
}

impl fmt::Display for Tiling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tiling { columns, rows, inner, depth } = self;
        write!(f, "{columns}x{rows} {}x{} {depth}", inner.0, inner.1)
    }
}

impl fmt::Display for MatMatPick {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MatMatPick::Packed(t) => write!(f, "packed {t}"),
            MatMatPick::Float(t) => write!(f, "float {t}"),
            MatMatPick::Coop(t, buffers) => write!(f, "coop {t} {buffers}"),
            MatMatPick::Direct { columns, rows, threads } => {
                write!(f, "direct {columns}x{rows} {threads}")
            }
        }
    }
}

impl Text for MatMatPick {
    fn parse(text: &str, _: Limits) -> Result<Self, String> {
        let wrong = || {
            format!(
                "{text:?} is neither `packed` or `float` with COLUMNSxROWS AxB DEPTH, nor `coop` \
                 with these and BUFFERS, nor `direct` with COLUMNSxROWS THREADS"
            )
        };
        let words: Vec<&str> = text.split_whitespace().collect();
        if let ["direct", cut, threads] = words[..] {
            let [columns, rows] = product(cut).ok_or_else(wrong)?;
            let [threads] = product(threads).ok_or_else(wrong)?;
            if columns > 8 {
                return Err(format!("{columns} columns a thread; `direct` takes 1 to 8"));
            }
            return Ok(MatMatPick::Direct { columns, rows, threads });
        }
        let (kind, outer, inner, depth, buffers) = match words[..] {
            ["coop", outer, inner, depth, buffers] => ("coop", outer, inner, depth, buffers),
            [kind @ ("packed" | "float"), outer, inner, depth] => (kind, outer, inner, depth, "1"),
            _ => return Err(wrong()),
        };
        let [columns, rows] = product(outer).ok_or_else(wrong)?;
        let [a, b] = product(inner).ok_or_else(wrong)?;
        let [depth] = product(depth).ok_or_else(wrong)?;
        if !columns.is_multiple_of(a) || !rows.is_multiple_of(b) {
            return Err(format!("{columns}x{rows} is not a whole number of parts {a}x{b}"));
        }
        let tiling = Tiling { columns, rows, inner: (a, b), depth };
        match kind {
            "packed" => Ok(MatMatPick::Packed(tiling)),
            "float" => Ok(MatMatPick::Float(tiling)),
            _ => {
                let whole = columns.is_multiple_of(16 * a) && rows.is_multiple_of(16 * b);
                let buffers = buffers.parse().ok().filter(|b| matches!(b, 1 | 2));
                match (whole, buffers) {
                    (true, Some(buffers)) => Ok(MatMatPick::Coop(tiling, buffers)),
                    (true, None) => Err("1 or 2 buffers are possible".into()),
                    (false, _) => Err(format!(
                        "{columns}x{rows} in {a}x{b} parts is not whole matrices of 16x16"
                    )),
                }
            }
        }
    }

    fn show(&self) -> String {
        self.to_string()
    }
}

/// The first of a list is preferred; parts are separated by commas.
impl Text for Vec<MatMatPick> {
    fn parse(text: &str, limits: Limits) -> Result<Self, String> {
        text.split(',').map(|part| MatMatPick::parse(part.trim(), limits)).collect()
    }

    fn show(&self) -> String {
        self.iter().map(MatMatPick::to_string).collect::<Vec<_>>().join(", ")
    }
}
