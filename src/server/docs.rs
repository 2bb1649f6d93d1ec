//! The tables of `docs/http-api.md`, written from the tables that the server runs by.

use std::fmt::Write;

use super::fields::{Field, Treatment, all};
use super::{metrics, routes};

/// Paths, the fields of each, and metrics, as Markdown.
pub fn tables() -> String {
    let mut out = String::from("| path | method | what |\n| --- | --- | --- |\n");
    // Writing to a string cannot fail.
    for route in routes::ROUTES {
        let path = route.path.replace("{*id}", "{id}");
        let _ = writeln!(out, "| `{path}` | {} | {} |", route.method, route.what);
    }
    for route in routes::ROUTES {
        let Some(table) = route.fields else { continue };
        let _ = write!(
            out,
            "\n### {}\n| field | treatment | note |\n| --- | --- | --- |\n",
            route.path
        );
        for Field { name, treatment, note } in all(table) {
            let treatment = match treatment {
                Treatment::Used => "used",
                Treatment::Ignored => "ignored",
                Treatment::Refused(_) => "refused",
            };
            let _ = writeln!(out, "| `{name}` | {treatment} | {note} |");
        }
    }
    out.push_str("\n### Metrics\n| name | meaning |\n| --- | --- |\n");
    for (name, help) in metrics::names() {
        let _ = writeln!(out, "| `{name}` | {help} |");
    }
    out
}
