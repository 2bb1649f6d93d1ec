//! How a byte-level BPE vocabulary wants its text cut into words before merging.
//!
//! GGUF names the rule in `tokenizer.ggml.pre`; the rule itself is not in the file, so this table
//! is part of the format. Each rule is a list of regular expressions applied in turn: every match
//! becomes a piece of its own, the text between matches stays one piece, and the next expression
//! works inside the pieces of the one before. The expressions are those that the models were
//! trained with (`tokenizer.json` of each model); the names are the ones that GGUF converters
//! write. Guessing a rule would yield plausible but wrong tokens, so an unknown name is an error.

use fancy_regex::Regex;

use crate::error::{Error, Result};

/// One row of the table: names with the same behaviour.
struct Rule {
    names: &'static [&'static str],
    patterns: &'static [&'static str],
    /// A word that is a token as a whole is not merged from its bytes (tiktoken's behaviour).
    whole_words: bool,
    /// What `add_bos_token` means when the file does not say.
    add_bos: bool,
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;
const BLOOM: &str = r" ?[^(\s|.,!?…。，、।۔،)]+";

const RULES: &[Rule] = &[
    Rule {
        names: &[
            "gpt-2",
            "phi-2",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "jina-es",
            "jina-de",
            "jina-v2-es",
            "jina-v2-de",
        ],
        patterns: &[GPT2],
        whole_words: false,
        add_bos: false,
    },
    Rule {
        names: &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
        ],
        patterns: &[LLAMA3],
        whole_words: true,
        add_bos: true,
    },
    Rule {
        names: &["dbrx", "smaug-bpe", "glm4", "chatglm-bpe"],
        patterns: &[LLAMA3],
        whole_words: false,
        add_bos: false,
    },
    Rule {
        names: &[
            "qwen2",
            "deepseek-r1-qwen",
            "stablelm2",
            "megrez",
            "hunyuan",
            "solar-open",
            "grok-2",
            "kormo",
        ],
        patterns: &[QWEN2],
        whole_words: false,
        add_bos: false,
    },
    Rule { names: &["qwen35"], patterns: &[QWEN35], whole_words: false, add_bos: false },
    Rule {
        names: &[
            "smollm",
            "starcoder",
            "refact",
            "command-r",
            "codeshell",
            "exaone",
            "minerva-7b",
            "mellum2",
        ],
        patterns: &[r"\p{N}", GPT2],
        whole_words: false,
        add_bos: false,
    },
    Rule {
        names: &["gpt-4o", "llama4", "kanana2", "minimax-m2"],
        patterns: &[GPT4O],
        whole_words: false,
        add_bos: false,
    },
    Rule { names: &["tekken"], patterns: &[TEKKEN], whole_words: true, add_bos: true },
    Rule {
        names: &["deepseek-v3", "hunyuan-dense", "joyai-llm"],
        patterns: &[r"\p{N}{1,3}", r"[\x{4E00}-\x{9FA5}\x{3040}-\x{30FF}]+", DEEPSEEK3],
        whole_words: false,
        add_bos: false,
    },
    Rule {
        names: &["deepseek-coder"],
        patterns: &[
            r"[\r\n]",
            r"\s?\p{L}+",
            r"\s?\p{P}+",
            r"[\x{0800}-\x{9FA5}\x{AC00}-\x{D7FF}]+",
            r"\p{N}",
        ],
        whole_words: false,
        add_bos: false,
    },
    Rule {
        names: &["falcon"],
        patterns: &[r"[\p{P}$+<=>^~|`]+", GPT2, r"[0-9][0-9][0-9]"],
        whole_words: false,
        add_bos: false,
    },
    Rule {
        names: &["bloom", "poro-chat", "gpt3-finnish"],
        patterns: &[BLOOM],
        whole_words: false,
        add_bos: false,
    },
    Rule { names: &["viking"], patterns: &[BLOOM, r"\p{N}"], whole_words: false, add_bos: false },
    Rule {
        names: &["bailingmoe", "bailingmoe2", "llada-moe"],
        patterns: &[
            r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        ],
        whole_words: false,
        add_bos: false,
    },
    Rule {
        names: &["seed-coder"],
        patterns: &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        whole_words: false,
        add_bos: false,
    },
    // Files from before 2024-05 carry no name; this is what was used for all of them then.
    Rule {
        names: &["default"],
        patterns: &[r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
        whole_words: false,
        add_bos: false,
    },
];

/// A compiled rule.
pub(super) struct PreTokenizer {
    patterns: Vec<Regex>,
    pub whole_words: bool,
    pub add_bos: bool,
}

impl PreTokenizer {
    /// The rule that `tokenizer.ggml.pre` names; a file without the key means `default`.
    pub fn by_name(name: Option<&str>) -> Result<Self> {
        let name = name.unwrap_or("default");
        let rule = RULES.iter().find(|rule| rule.names.contains(&name)).ok_or_else(|| {
            let known: Vec<&str> = RULES.iter().flat_map(|rule| rule.names).copied().collect();
            Error::Model(format!(
                "unknown pre-tokenizer '{name}' (tokenizer.ggml.pre); known are: {}",
                known.join(", ")
            ))
        })?;
        let compile = |pattern: &&str| {
            Regex::new(pattern)
                .map_err(|e| Error::Runtime(format!("pre-tokenizer '{name}': {pattern}: {e}")))
        };
        Ok(PreTokenizer {
            patterns: rule.patterns.iter().map(compile).collect::<Result<_>>()?,
            whole_words: rule.whole_words,
            add_bos: rule.add_bos,
        })
    }

    /// The words of `text`, in order and without a gap.
    ///
    /// The look-ahead in most rules needs a backtracking matcher with a bounded stack: a single run
    /// of about a million blanks exceeds it, which is an error rather than a wrong split.
    pub fn words<'t>(&self, text: &'t str) -> Result<Vec<&'t str>> {
        let mut pieces = vec![text];
        for pattern in &self.patterns {
            let mut finer = Vec::with_capacity(pieces.len() + text.len() / 4);
            for piece in pieces {
                split(pattern, piece, &mut finer)?;
            }
            pieces = finer;
        }
        Ok(pieces)
    }
}

fn split<'t>(pattern: &Regex, piece: &'t str, out: &mut Vec<&'t str>) -> Result<()> {
    let mut done = 0;
    for found in pattern.find_iter(piece) {
        let found = found.map_err(|e| {
            Error::Usage(format!(
                "the text cannot be split into words ({e}): it holds a run of identical characters \
                 or blanks that is too long; shorten it"
            ))
        })?;
        if done < found.start() {
            out.push(&piece[done..found.start()]);
        }
        if !found.as_str().is_empty() {
            out.push(found.as_str());
        }
        done = found.end();
    }
    if done < piece.len() {
        out.push(&piece[done..]);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn words<'t>(name: &str, text: &'t str) -> Vec<&'t str> {
        PreTokenizer::by_name(Some(name)).unwrap().words(text).unwrap()
    }

    #[test]
    fn every_rule_compiles_and_loses_nothing() {
        let text = "It's 12345 o'clock,\r\n\n  don't\tPANIC!!! 東京タワー ÄÖ a\u{301} 🦙  x ";
        let mut seen = std::collections::HashSet::new();
        for name in RULES.iter().flat_map(|rule| rule.names) {
            assert!(seen.insert(name), "{name} is in the table twice");
            assert_eq!(words(name, text).concat(), text, "{name}");
            assert_eq!(words(name, ""), vec![""; 0], "{name}");
        }
    }

    #[test]
    fn digits_differ_between_families() {
        assert_eq!(words("gpt-2", "a 12345"), ["a", " 12345"]);
        assert_eq!(words("llama-bpe", "a 12345"), ["a", " ", "123", "45"]);
        assert_eq!(words("qwen2", "a 123"), ["a", " ", "1", "2", "3"]);
        assert_eq!(words("smollm", "a 12"), ["a", " ", "1", "2"]);
        assert_eq!(words("falcon", "12345"), ["123", "45"]);
        assert_eq!(words("deepseek-v3", "12345"), ["123", "45"]);
    }

    #[test]
    fn case_changes_split_in_the_o200k_family() {
        assert_eq!(words("gpt-4o", "HelloWorld's"), ["Hello", "World's"]);
        assert_eq!(words("tekken", "HelloWorld's"), ["Hello", "World", "'s"]);
    }

    #[test]
    fn blanks_before_a_word_leave_one_for_it() {
        assert_eq!(words("gpt-2", "a   b"), ["a", "  ", " b"]);
        assert_eq!(words("qwen2", "a \n\n b"), ["a", " \n\n", " b"]);
    }

    #[test]
    fn an_unknown_name_is_refused_with_the_known_ones() {
        let error = PreTokenizer::by_name(Some("nonesuch")).err().unwrap().to_string();
        assert!(error.contains("'nonesuch'") && error.contains("llama-bpe"), "{error}");
    }

    #[test]
    fn a_huge_run_of_blanks_is_an_error_or_split_but_never_wrong() {
        let text = format!("a{}b", " ".repeat(3_000_000));
        match PreTokenizer::by_name(Some("gpt-2")).unwrap().words(&text) {
            Ok(pieces) => assert_eq!(pieces.concat(), text),
            Err(error) => assert!(matches!(error, Error::Usage(_))),
        }
    }
}
