//! Chat templates: the dialect that Hugging Face runs.

use kvern_text::{ChatTemplate, Error, Message};

fn render(source: &str, messages: &[Message]) -> Result<String, Error> {
    ChatTemplate::new(source, Some("<s>"), Some("</s>"))?.render(messages, true)
}

fn conversation() -> Vec<Message> {
    vec![Message::new("system", "Be brief."), Message::new("user", "Hi <there> & \"you\"")]
}

#[test]
fn blocks_are_trimmed_and_tokens_are_known() {
    let source = "{{ bos_token }}\n{% for m in messages %}\n    {% if m.role == 'user' %}\n[{{ m['content'] }}]\n    {% endif %}\n{% endfor %}\n{% if add_generation_prompt %}>{% endif %}";
    assert_eq!(render(source, &conversation()).unwrap(), "<s>\n[Hi <there> & \"you\"]\n>");
}

#[test]
fn python_s_methods_exist() {
    let source = "{{ messages[0].content.strip('.').upper() }}|{{ messages[1].content.startswith('Hi') }}|{{ messages[1]['content'].split(' ')[-1] }}";
    assert_eq!(render(source, &conversation()).unwrap(), "BE BRIEF|True|\"you\"");
}

#[test]
fn json_is_python_s_json() {
    let source = "{{ messages[1] | tojson }}";
    let want = r#"{"role": "user", "content": "Hi <there> & \"you\""}"#;
    assert_eq!(render(source, &conversation()).unwrap(), want);
    let source = "{{ {'a': [1, 2]} | tojson(indent=2) }}";
    assert_eq!(render(source, &[]).unwrap(), "{\n  \"a\": [\n    1,\n    2\n  ]\n}");
}

#[test]
fn loop_controls_and_namespaces_work() {
    let source = "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'user' %}{% break %}{% endif %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}";
    assert_eq!(render(source, &conversation()).unwrap(), "1");
}

#[test]
fn dates_are_formatted() {
    let year: u32 = render("{{ strftime_now('%Y') }}", &[]).unwrap().parse().unwrap();
    assert!(year >= 2024);
}

#[test]
fn refusals_and_mistakes_are_errors() {
    let refused = render("{{ raise_exception('roles must alternate') }}", &[]).unwrap_err();
    assert_eq!(refused.to_string(), "chat template: roles must alternate");
    assert!(matches!(render("{% for %}", &[]), Err(Error::Template(_))));
    assert!(matches!(render("{{ nothing.at.all }}", &[]), Err(Error::Template(_))));
    let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{{ a * b }}{% endfor %}{% endfor %}";
    assert!(matches!(render(endless, &[]), Err(Error::Template(_))), "a template that does not end is stopped");
}
