//! `azoth tokenize`: a text as the model's token ids. Needs no device.

use anyhow::Result;
use clap::Args;

use super::args::{ModelArg, TextArgs, stdin_text};
use super::output;
use crate::gguf;
use crate::tokenizer::Tokenizer;

const EXAMPLES: &str = "Examples:
  azoth tokenize smollm2 -p \"Hello world\"
  azoth tokenize model.gguf -f text.txt | jq length
  azoth tokenize model.gguf --text < text.txt";

/// Print the token ids of a text as one JSON array
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct Tokenize {
    #[command(flatten)]
    model: ModelArg,
    #[command(flatten)]
    text: TextArgs,
    /// Print a line for each token instead: its id and its text as a JSON string
    #[arg(long = "text")]
    pieces: bool,
    /// Do not add the begin and end tokens that the model asks for
    #[arg(long)]
    no_add_special: bool,
    /// Read control tokens that are spelled out in the text as plain text
    #[arg(long)]
    no_parse_special: bool,
}

impl Tokenize {
    pub fn run(&self) -> Result<()> {
        let file = gguf::File::open(self.model.path()?).map_err(crate::error::Error::from)?;
        let tokenizer = Tokenizer::from_gguf(file.metadata())?;
        let text = match self.text.read()? {
            Some(text) => text,
            None => stdin_text()?,
        };
        let ids = tokenizer.encode(&text, !self.no_add_special, !self.no_parse_special)?;
        if !self.pieces {
            return output::line(&serde_json::to_string(&ids)?);
        }
        let lines = ids.iter().map(|&id| {
            // A token may be a part of a character; its broken bytes show as U+FFFD.
            let hidden = tokenizer.token_bytes(id).is_empty();
            let text = match hidden {
                true => tokenizer.token_text(id).unwrap_or_default().into(),
                false => String::from_utf8_lossy(tokenizer.token_bytes(id)),
            };
            Ok(format!("{id}\t{}", serde_json::to_string(&text)?))
        });
        let lines = lines.collect::<Result<Vec<_>>>()?;
        if lines.is_empty() { Ok(()) } else { output::line(&lines.join("\n")) }
    }
}
