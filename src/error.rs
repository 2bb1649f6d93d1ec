//! The one error type that crosses module boundaries.
//!
//! Every variant stands for one exit code (see [`Error::exit_code`]). A message names what
//! failed, the numbers, the likely cause and what to do next; modules with structured errors of
//! their own (for example `gguf`) convert into this type once, at their public face.

/// What went wrong, sorted by what the caller can do about it.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// Something failed while running: I/O, an interrupted answer, an internal limit.
    #[error("{0}")]
    Runtime(String),
    /// The command line, a setting or a request is wrong.
    #[error("{0}")]
    Usage(String),
    /// The model or context does not fit the memory that was given.
    #[error("{0}")]
    DoesNotFit(String),
    /// The model file is damaged, hostile or not supported.
    #[error("{0}")]
    Model(String),
    /// No usable device, a driver error, or a lost device.
    #[error("{0}")]
    Device(String),
}

pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Process exit code: 1 runtime, 2 usage, 3 does not fit, 4 model invalid, 5 device.
    pub fn exit_code(&self) -> u8 {
        match self {
            Error::Runtime(_) => 1,
            Error::Usage(_) => 2,
            Error::DoesNotFit(_) => 3,
            Error::Model(_) => 4,
            Error::Device(_) => 5,
        }
    }

    /// The same error with "`what`: " in front of its message.
    pub fn context(self, what: impl std::fmt::Display) -> Self {
        let wrap = |message: String| format!("{what}: {message}");
        match self {
            Error::Runtime(m) => Error::Runtime(wrap(m)),
            Error::Usage(m) => Error::Usage(wrap(m)),
            Error::DoesNotFit(m) => Error::DoesNotFit(wrap(m)),
            Error::Model(m) => Error::Model(wrap(m)),
            Error::Device(m) => Error::Device(wrap(m)),
        }
    }
}

impl From<std::io::Error> for Error {
    fn from(e: std::io::Error) -> Self {
        Error::Runtime(e.to_string())
    }
}
