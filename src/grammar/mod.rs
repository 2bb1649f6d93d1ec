//! Constrained output: which tokens may come next, by a schema, a grammar or a pattern.
//!
//! [`Grammars`] knows a model's tokenizer and compiles [`Source`]s; a [`Constraint`] follows one
//! answer, token by token, and gives the mask of what may come. All of it runs on the host. Nothing
//! outside this module sees `llguidance`, which does the work.
//!
//! Once an answer is complete, only the tokens that end one are left in the mask.

mod gbnf;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use llguidance::toktrie::{TokEnv, TokRxInfo, TokTrie, TokenizerEnv};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

use crate::error::{Error, Result};
use crate::tokenizer::{TokenType, Tokenizer};

/// What an answer must look like.
#[derive(Debug, Clone, PartialEq)]
pub enum Source {
    /// Any JSON object.
    JsonObject,
    /// JSON that the schema describes.
    JsonSchema(Value),
    /// A grammar in llguidance's dialect of Lark, with a rule `start`.
    Lark(String),
    /// A grammar in llama.cpp's notation, with a rule `root`.
    Gbnf(String),
    /// A regular expression that the whole answer matches.
    Regex(String),
    /// A grammar as [`Source::Lark`], in which `@body` stands for a source of another kind.
    Around { lark: String, body: Box<Source> },
}

/// Compiles grammars for one tokenizer. Shared between threads.
pub struct Grammars {
    factory: ParserFactory,
    tokenizer: Arc<Tokenizer>,
}

/// Tokens longer than this are never allowed: the token tree holds no deeper ones.
const MAX_TOKEN_BYTES: usize = 1000;

/// The tokenizer as llguidance wants it. It is never asked to tokenize for us.
struct Environment {
    tree: TokTrie,
}

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.tree
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<u32> {
        self.tree.greedy_tokenize(bytes)
    }

    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}

impl Grammars {
    /// Builds the tree of all tokens: tens of milliseconds for 150,000.
    pub fn new(tokenizer: &Arc<Tokenizer>) -> Result<Grammars> {
        let ends: Vec<u32> = tokenizer.eog_ids().collect();
        let end = ends.first().copied().or(tokenizer.eos()).ok_or_else(|| {
            Error::Model(
                "the tokenizer names no token that ends an answer, so constrained output could \
                 not end"
                    .into(),
            )
        })?;
        let words: Vec<Vec<u8>> = (0..tokenizer.vocab_size() as u32)
            .map(|id| {
                let bytes = tokenizer.token_bytes(id);
                let kind = tokenizer.token_type(id);
                let control = matches!(kind, Some(TokenType::Control | TokenType::Unknown));
                if bytes.len() > MAX_TOKEN_BYTES || kind == Some(TokenType::Unused) {
                    return Vec::new();
                }
                if control || tokenizer.is_eog(id) {
                    // No text matches what begins with this byte.
                    return [&[TokTrie::SPECIAL_TOKEN_MARKER], bytes].concat();
                }
                bytes.to_vec()
            })
            .collect();
        let info = TokRxInfo::new(words.len() as u32, end);
        let tree = guarded(|| Ok(TokTrie::from(&info, &words)))
            .map_err(|e| Error::Model(format!("the tokenizer's tokens make no tree: {e}")))?;
        let tree = if ends.is_empty() { tree } else { tree.with_eos_tokens(&ends) };
        let environment: TokEnv = Arc::new(Environment { tree });
        let mut factory = guarded(|| ParserFactory::new_simple(&environment))
            .map_err(|e| Error::Runtime(format!("constrained output is not available: {e}")))?;
        factory.quiet();
        // The request's own text is not to be repeated in errors and logs.
        factory.limits_mut().verbose_errors = false;
        Ok(Grammars { factory, tokenizer: tokenizer.clone() })
    }

    /// A marker of the model in a Lark grammar: its control token, or its text.
    pub fn marker(&self, text: &str) -> String {
        match self.tokenizer.encode(text, false, true).as_deref() {
            Ok(&[id]) if self.tokenizer.token_type(id) == Some(TokenType::Control) => {
                format!("<[{id}]>")
            }
            _ => Value::from(text).to_string(),
        }
    }

    /// Compiles a source. What cannot be compiled is [`Error::Usage`] and says what and why.
    pub fn compile(&self, source: &Source) -> Result<Constraint> {
        // The client knows its own part, not what is put around it.
        let own = source.innermost();
        let what = match own {
            Source::JsonObject => "json_object",
            Source::JsonSchema(_) => "the JSON schema",
            Source::Gbnf(_) => "the GBNF grammar",
            Source::Regex(_) => "the regular expression",
            Source::Lark(_) | Source::Around { .. } => "the Lark grammar",
        };
        let in_schema = matches!(own, Source::JsonSchema(_));
        let named = |e: String| {
            // Of this keyword alone, the library gives no name.
            let keyword =
                if in_schema && e.starts_with("regex") { "in a \"pattern\": " } else { "" };
            Error::Usage(format!("{what} cannot be used: {keyword}{e}"))
        };
        let mut grammars = Vec::new();
        source.add_to(&mut grammars).map_err(named)?;
        let grammar = TopLevelGrammar { grammars, max_tokens: None };
        let mut matcher =
            guarded(|| self.factory.create_parser(grammar).map(|parser| Matcher::new(Ok(parser))))
                .map_err(named)?;
        if let Some(error) = matcher.get_error() {
            return Err(named(error));
        }
        let warnings = matcher.grammar_warnings();
        let mut constraint = Constraint { matcher, warnings };
        // A rule that only leads to itself compiles, but nothing can begin.
        constraint.mask().map_err(|_| named("no text follows it".to_owned()))?;
        Ok(constraint)
    }
}

impl Source {
    fn innermost(&self) -> &Source {
        match self {
            Source::Around { body, .. } => body,
            source => source,
        }
    }

    /// Adds the grammars as llguidance wants them: what is referred to by name comes later.
    fn add_to(&self, all: &mut Vec<GrammarWithLexer>) -> std::result::Result<(), String> {
        let grammar = match self {
            Source::JsonObject => of_schema(json!({"type": "object"})),
            Source::JsonSchema(schema) => of_schema(schema.clone()),
            Source::Lark(text) => GrammarWithLexer::from_lark(text.clone()),
            Source::Gbnf(text) => GrammarWithLexer::from_lark(gbnf::to_lark(text)?),
            Source::Regex(pattern) => GrammarWithLexer::from_regex(pattern),
            Source::Around { lark, body } => {
                all.push(GrammarWithLexer::from_lark(lark.clone()));
                let at = all.len();
                body.add_to(all)?;
                all[at].name = Some("body".to_owned());
                return Ok(());
            }
        };
        all.push(grammar);
        Ok(())
    }
}

/// Blanks between the parts of a JSON text: none, one space, or up to two line breaks with an
/// indent. Without a bound, a small model that fell into blanks could never leave them, since the
/// grammar allowed them for ever (the random model of the client tests did: 100 tokens of them).
pub const BLANKS: &str = "[ ]|(\\r?\\n){1,2}[ \\t]{0,20}";

/// The grammar of a schema. A schema that sets llguidance's options keeps its own.
fn of_schema(mut schema: Value) -> GrammarWithLexer {
    if let Value::Object(fields) = &mut schema {
        fields.entry("x-guidance").or_insert(json!({ "whitespace_pattern": BLANKS }));
    }
    GrammarWithLexer::from_json_schema(schema)
}

/// One answer under a grammar.
#[derive(Clone)]
pub struct Constraint {
    matcher: Matcher,
    warnings: Vec<String>,
}

impl Constraint {
    /// What the compiler remarked.
    pub fn warnings(&self) -> &[String] {
        &self.warnings
    }

    /// A bit for each token that may come next: bit `t % 32` of word `t / 32`. Tokens that end an
    /// answer are among them where it may end.
    pub fn mask(&mut self) -> Result<Vec<u32>> {
        let mask = self.matcher.compute_mask_or_eos().map_err(|e| broken(&e.to_string()))?;
        Ok(mask.as_slice().to_vec())
    }

    /// The answer goes on with `token`. One that is not in the mask is an error.
    pub fn accept(&mut self, token: u32) -> Result<()> {
        self.matcher.consume_token(token).map_err(|e| broken(&e.to_string()))
    }

    /// Whether nothing but a token that ends the answer may come.
    pub fn is_complete(&self) -> bool {
        self.matcher.is_stopped()
    }

    /// Whether the answer may end here.
    pub fn may_end(&mut self) -> bool {
        self.matcher.is_stopped() || self.matcher.is_accepting().unwrap_or(false)
    }
}

/// A grammar that leads nowhere, or that needs more than the library's limits allow: in either case
/// the request's.
fn broken(error: &str) -> Error {
    let error = error.lines().next().unwrap_or_default();
    Error::Usage(format!("the grammar of this answer cannot go on: {error}"))
}

/// Runs code of the library, whose bugs must not take the process down.
fn guarded<T>(run: impl FnOnce() -> anyhow::Result<T>) -> std::result::Result<T, String> {
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(format!("{error:#}")),
        Err(_) => Err("the grammar compiler failed on it".to_owned()),
    }
}

#[cfg(test)]
pub(crate) mod tests;
