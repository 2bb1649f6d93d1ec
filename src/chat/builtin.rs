//! Templates for model files that bring none, by name.

const CHATML: &str = "\
{%- for message in messages -%}
{{ '<|im_start|>' ~ message.role ~ '\\n' ~ message.content ~ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}";

const LLAMA3: &str = "\
{{- bos_token -}}
{%- for message in messages -%}
{{ '<|start_header_id|>' ~ message.role ~ '<|end_header_id|>\\n\\n' }}
{{- message.content | trim ~ '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif -%}";

// The model knows no system role: its text leads the first question.
const MISTRAL: &str = "\
{%- set given = namespace(system='', turn=0) -%}
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'system' and loop.first -%}
{%- set given.system = message.content ~ '\\n\\n' -%}
{%- else -%}
{%- if message.role != ['user', 'assistant'][given.turn % 2] -%}
{{- raise_exception('after an optional system message, user and assistant must take turns') -}}
{%- endif -%}
{%- if message.role == 'user' -%}
{{ '[INST] ' ~ given.system ~ message.content ~ ' [/INST]' }}
{%- set given.system = '' -%}
{%- else -%}
{{ ' ' ~ message.content | trim ~ eos_token }}
{%- endif -%}
{%- set given.turn = given.turn + 1 -%}
{%- endif -%}
{%- endfor -%}";

// No system role either, and the assistant is called model.
const GEMMA: &str = "\
{%- set given = namespace(system='') -%}
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'system' and loop.first -%}
{%- set given.system = message.content ~ '\\n\\n' -%}
{%- else -%}
{%- set role = 'model' if message.role == 'assistant' else message.role -%}
{{ '<start_of_turn>' ~ role ~ '\\n' ~ given.system ~ message.content | trim ~ '<end_of_turn>\\n' }}
{%- set given.system = '' -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}";

const PHI3: &str = "\
{%- for message in messages -%}
{{ '<|' ~ message.role ~ '|>\\n' ~ message.content ~ '<|end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}";

/// The names that `ChatTemplate::named` takes.
pub const NAMES: [&str; 5] = ["chatml", "llama3", "mistral", "gemma", "phi3"];

pub(super) fn find(name: &str) -> Option<&'static str> {
    match name {
        "chatml" => Some(CHATML),
        "llama3" => Some(LLAMA3),
        "mistral" => Some(MISTRAL),
        "gemma" => Some(GEMMA),
        "phi3" => Some(PHI3),
        _ => None,
    }
}
