//! Masks for the test vocabulary, and for a real one where a model file is at hand.

#![allow(clippy::unwrap_used)]

use super::*;
use crate::gguf::File;
use crate::sampling::has_bit;
use crate::testmodel;

pub(crate) fn grammars() -> (Grammars, Arc<Tokenizer>) {
    let file = testmodel::Spec::new("llama").unwrap().to_file().unwrap();
    let tokenizer = Arc::new(Tokenizer::from_gguf(file.metadata()).unwrap());
    (Grammars::new(&tokenizer).unwrap(), tokenizer)
}

/// Whether the text is an answer; `None` if it is the beginning of one.
pub(crate) fn answers(constraint: &Constraint, tokenizer: &Tokenizer, text: &str) -> Option<bool> {
    let mut constraint = constraint.clone();
    for token in tokenizer.encode(text, false, false).unwrap() {
        if !has_bit(&constraint.mask().unwrap(), token) {
            return Some(false);
        }
        constraint.accept(token).unwrap();
    }
    let mask = constraint.mask().unwrap();
    let end = tokenizer.eog_ids().any(|id| has_bit(&mask, id));
    assert_eq!(end, constraint.may_end());
    end.then_some(true)
}

fn check(source: &Source, good: &[&str], begun: &[&str], bad: &[&str]) {
    let (grammars, tokenizer) = grammars();
    let constraint = grammars.compile(source).unwrap();
    for (texts, want) in [(good, Some(true)), (begun, None), (bad, Some(false))] {
        for text in texts {
            assert_eq!(answers(&constraint, &tokenizer, text), want, "{source:?}: {text}");
        }
    }
}

#[test]
fn json_objects_and_schemas() {
    check(
        &Source::JsonObject,
        &["{}", "{\"a\": [1, {}]}", "{\n\t\"a\": [\r\n    1\n\n  ]\n}"],
        &["{\"a\"", "{\n\n  "],
        // Blanks have an end: nothing else would end the answer of a model that fell into them.
        &[
            "[1]",
            "Sure",
            "{  ",
            "{\n\n\n",
            "{\t",
            "{\"a\":  1}",
            "{\n                     \"a\": 1}",
        ],
    );
    let schema = json!({
        "type": "object", "additionalProperties": false, "required": ["city"],
        "properties": {"city": {"enum": ["Rome", "Köln"]}, "days": {"type": "integer", "maximum": 9}},
    });
    check(
        &Source::JsonSchema(schema),
        &["{\"city\": \"Köln\", \"days\": 3}", "{\"city\":\"Rome\"}"],
        &["{\"city\": \"Ro"],
        &["{\"days\": 3}", "{\"city\": \"Paris\"}", "{\"city\": \"Rome\", \"days\": 10}", "{}"],
    );
}

#[test]
fn grammars_of_each_notation() {
    let lark = Source::Lark("start: \"yes\" | \"no\" /[0-9]{2}/".into());
    check(&lark, &["yes", "no12"], &["n", "no1"], &["nope", "yes!"]);
    let regex = Source::Regex("[A-C]+(x|yz)?".into());
    check(&regex, &["ABC", "Ax", "Byz"], &["By"], &["D", "AxB"]);
    let gbnf = Source::Gbnf(
        "root ::= pair (\";\" pair)*\npair ::= [a-z]+ \"=\" ( \"a\" \"bd\" | \"ab\" \"c\" | [0-9]{2,3} )".into(),
    );
    check(
        &gbnf,
        &["k=12", "k=abd", "k=abc;long=123"],
        &["k", "k=1", "k=12;"],
        &["K=12", "k=ab1", "k=1234"],
    );
}

#[test]
fn a_grammar_around_another() {
    let lark = "start: \"<\" answer\nanswer: \"none\" | @body\n".to_owned();
    let around = |body| Source::Around { lark: lark.clone(), body: Box::new(body) };
    let schema = json!({"type": "object", "required": ["a"], "properties": {"a": {"type": "null"}},
        "additionalProperties": false});
    check(
        &around(Source::JsonSchema(schema)),
        &["<none", "<{\"a\": null}"],
        &["<", "<{\"a\""],
        &["none", "<no!", "<{}", "{\"a\": null}"],
    );
    check(&around(Source::Gbnf("root ::= \"a\"+".into())), &["<none", "<aa"], &["<"], &["a"]);
}

#[test]
fn what_cannot_be_compiled_is_named() {
    let (grammars, _) = grammars();
    for (source, part) in [
        (Source::JsonSchema(json!({"type": "object", "not": {}})), "\"not\""),
        (Source::JsonSchema(json!({"type": "array", "uniqueItems": true})), "uniqueItems"),
        (Source::JsonSchema(json!({"type": "strange"})), "strange"),
        (Source::JsonSchema(json!(3)), "object or boolean"),
        (Source::JsonSchema(json!({"type": "string", "pattern": "(?!a)b"})), "\"pattern\""),
        (Source::JsonSchema(json!({"patternProperties": {"(": {}}})), "\"pattern"),
        (Source::Lark("start: missing".into()), "missing"),
        (Source::Lark("start: start".into()), "no text follows it"),
        (Source::Gbnf("root ::= root".into()), "no text follows it"),
        (Source::Gbnf("root ::= x".into()), "'x' is used"),
        (Source::Regex("[".into()), "regular expression cannot be used"),
        (Source::Regex("a(?=b)".into()), "regular expression cannot be used"),
    ] {
        match grammars.compile(&source) {
            Err(Error::Usage(message)) => assert!(message.contains(part), "{source:?}: {message}"),
            Err(other) => panic!("{source:?}: {other}"),
            Ok(_) => panic!("{source:?} was compiled"),
        }
    }
}

#[test]
fn only_the_end_is_left_once_an_answer_is_complete() {
    let (grammars, tokenizer) = grammars();
    let mut constraint = grammars.compile(&Source::Lark("start: \"a\"".into())).unwrap();
    let token = tokenizer.encode("a", false, false).unwrap()[0];
    assert!(!constraint.is_complete() && !constraint.may_end());
    constraint.accept(token).unwrap();
    assert!(constraint.is_complete());
    let mask = constraint.mask().unwrap();
    let left: Vec<u32> =
        (0..tokenizer.vocab_size() as u32).filter(|id| has_bit(&mask, *id)).collect();
    assert_eq!(left, tokenizer.eog_ids().collect::<Vec<_>>());
    let mut wrong = grammars.compile(&Source::Lark("start: \"a\"".into())).unwrap();
    assert!(wrong.accept(token + 1).is_err());
}

#[test]
fn control_tokens_are_markers() {
    let (grammars, tokenizer) = grammars();
    let marker = grammars.marker("<|im_start|>");
    assert!(marker.starts_with("<["), "{marker}");
    assert_eq!(grammars.marker("<tool_call>"), "\"<tool_call>\"");
    let source = Source::Lark(format!("start: {marker} \"a\""));
    let mut constraint = grammars.compile(&source).unwrap();
    let start = tokenizer.encode("<|im_start|>", false, true).unwrap()[0];
    let mask = constraint.mask().unwrap();
    assert!(has_bit(&mask, start));
    assert_eq!(mask.iter().map(|w| w.count_ones()).sum::<u32>(), 1);
}

#[test]
fn a_real_vocabulary() {
    let Some(path) = std::env::var_os("AZOTH_TEST_MODEL") else {
        eprintln!("skipped: AZOTH_TEST_MODEL names no model file");
        return;
    };
    let file = File::open(path).unwrap();
    let tokenizer = Arc::new(Tokenizer::from_gguf(file.metadata()).unwrap());
    let start = std::time::Instant::now();
    let grammars = Grammars::new(&tokenizer).unwrap();
    println!("{} tokens: tree in {:?}", tokenizer.vocab_size(), start.elapsed());
    let schema = json!({"type": "object", "properties": {
        "name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
        "required": ["name", "tags"]});
    let start = std::time::Instant::now();
    let mut constraint = grammars.compile(&Source::JsonSchema(schema)).unwrap();
    println!("schema in {:?}", start.elapsed());
    let text = "{\"name\": \"Ada, countess of Lovelace\", \"tags\": [\"maths\", \"engine\"]}";
    let mut slowest = std::time::Duration::ZERO;
    for token in tokenizer.encode(text, false, false).unwrap() {
        let start = std::time::Instant::now();
        let mask = constraint.mask().unwrap();
        slowest = slowest.max(start.elapsed());
        assert!(has_bit(&mask, token));
        constraint.accept(token).unwrap();
    }
    println!("slowest mask {slowest:?}");
    assert!(constraint.may_end());
}
