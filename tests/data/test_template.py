"""Loss masks, written by hand token by token, and the laws they obey for any conversation."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from mars.data.formats import Chat, Text
from mars.data.template import encode_chat, encode_text, has_generation_markers
from mars.default_model import default_model_folder
from mars.errors import UserError

END = 2
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>\n"
    "{% endgeneration %}{% else %}{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED_WITHOUT_END = MARKED.replace(
    "<|im_end|>\n{% endgeneration %}", "{% endgeneration %}<|im_end|>\n"
)
# As in the tokenizer of SmolLM2-Instruct.
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nbe good<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Writes the end-of-text token after the last turn, unless an answer is asked for (as Phi-3 does).
PHI3 = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|endoftext|>{% endif %}"
)
# Adds an empty thought to the last turn only (as Qwen3 does).
REWRITING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if loop.last and m['role'] == 'assistant' %}<think>{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat(*contents: str, context: int = 0, system: str | None = None) -> Chat:
    """Make a conversation of user and assistant in turn."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    for index, content in enumerate(contents):
        messages.append({"role": ("user", "assistant")[index % 2], "content": content})
    return Chat(messages=messages, context=context)


def mask_letters(supervised: list[bool]) -> str:
    return "".join(".^"[value] for value in supervised)


GOLDEN = [
    # (conversation, last turn only, tokens, mask); S = <|im_start|>, E = <|im_end|>, N = newline
    (
        chat("a", "bc"),
        False,
        "SuserNaENSassistantNbcEN",
        "....................^^^.",
    ),
    (
        chat("a", "b", "c", "de"),
        False,
        "SuserNaENSassistantNbENSuserNcENSassistantNdeEN",
        "....................^^.....................^^^.",
    ),
    (
        chat("a", "b", "c", "de"),
        True,
        "SuserNaENSassistantNbENSuserNcENSassistantNdeEN",
        "...........................................^^^.",
    ),
    (
        chat("a", "b", "c", "de", context=3),
        False,
        "SuserNaENSassistantNbENSuserNcENSassistantNdeEN",
        "...........................................^^^.",
    ),
    (
        chat("a", "b", "c", system="x"),
        False,
        "SsystemNxENSuserNaENSassistantNbENSuserNcEN",
        "...............................^^..........",
    ),
]


@pytest.mark.parametrize(("conversation", "last_turn_only", "tokens", "mask"), GOLDEN)
@pytest.mark.parametrize("template", ["own", MARKED, MARKED_WITHOUT_END])
def test_golden_masks(
    tokenizer_with, tiny_tokenizer, letters, template, conversation, last_turn_only, tokens, mask
):
    tokenizer = tiny_tokenizer if template == "own" else tokenizer_with(template)
    ids, supervised = encode_chat(
        conversation, tokenizer, eos_token_ids={END}, last_turn_only=last_turn_only
    )
    assert letters(ids) == tokens
    assert mask_letters(supervised) == mask


def test_smollm2_inserts_a_system_prompt(tokenizer_with, letters):
    tokenizer = tokenizer_with(SMOLLM2)
    ids, supervised = encode_chat(chat("a", "b", "c", "d"), tokenizer, eos_token_ids={0, END})
    assert letters(ids) == ("SsystemNbe_goodENSuserNaENSassistantNbENSuserNcENSassistantNdEN")
    assert mask_letters(supervised) == (
        ".....................................^^.....................^^."
    )


@pytest.mark.slow
@pytest.mark.skipif(not default_model_folder().is_dir(), reason="the default model is not here")
def test_tokenizer_of_the_default_model():
    tokenizer = AutoTokenizer.from_pretrained(default_model_folder())
    ids, supervised = encode_chat(
        chat("Hi", "Hello there.", "More"), tokenizer, eos_token_ids={END}
    )
    learnt = [token for token, target in zip(ids, supervised, strict=True) if target]
    assert tokenizer.convert_ids_to_tokens(learnt) == ["Hello", "Ġthere", ".", "<|im_end|>"]
    prompt = tokenizer.apply_chat_template(
        chat("Hi").messages, add_generation_prompt=True, return_dict=False
    )
    assert ids[: supervised.index(True)] == prompt


def test_token_after_the_end_of_turn_is_not_supervised(tokenizer_with, letters):
    ids, supervised = encode_chat(
        chat("a", "b", "c", "d"), tokenizer_with(PHI3), eos_token_ids={0, END}
    )
    assert letters(ids) == "SuserNaENSassistantNbENSuserNcENSassistantNdENP"
    assert mask_letters(supervised) == "....................^^.....................^^.."


def test_token_across_the_start_of_the_answer_belongs_to_it(merging_tokenizer):
    conversation = chat("a", "\nb")
    plain = encode_chat(conversation, merging_tokenizer, eos_token_ids={END})
    merging_tokenizer.chat_template = MARKED
    assert encode_chat(conversation, merging_tokenizer, eos_token_ids={END}) == plain
    first = plain[1].index(True)
    assert merging_tokenizer.convert_ids_to_tokens(plain[0])[first:] == [
        "ĊĊ",
        "b",
        "<|im_end|>",
        "Ċ",
    ]


def test_rewritten_history(tokenizer_with, letters):
    tokenizer = tokenizer_with(REWRITING)
    single = encode_chat(chat("a", "b"), tokenizer, eos_token_ids={END})
    assert letters(single[0]) == "SuserNaENSassistantN<think>bEN"
    assert mask_letters(single[1]) == "....................^^^^^^^^^."
    conversation = chat("a", "b", "c", "d")
    ids, supervised = encode_chat(conversation, tokenizer, eos_token_ids={END}, last_turn_only=True)
    assert letters(ids) == "SuserNaENSassistantNbENSuserNcENSassistantN<think>dEN"
    assert mask_letters(supervised) == "." * 43 + "^^^^^^^^^."
    with pytest.raises(UserError, match=r"rewrites assistant turns.*last_turn_only"):
        encode_chat(conversation, tokenizer, eos_token_ids={END})


def test_qwen3_uses_the_marked_template_of_trl(tokenizer_with):
    templates = pytest.importorskip("trl.chat_template_utils")
    tokenizer = tokenizer_with(templates.qwen3_chat_template)
    ids, supervised = encode_chat(chat("a", "b", "c", "d"), tokenizer, eos_token_ids={END})
    learnt = [token for token, target in zip(ids, supervised, strict=True) if target]
    thought = "<think>\n\n</think>\n\n"
    assert tokenizer.decode(learnt) == f"{thought}b<|im_end|>{thought}d<|im_end|>"
    single = encode_chat(chat("a", "b"), tokenizer, eos_token_ids={END})
    assert tokenizer.decode(single[0]).endswith(f"assistant\n{thought}b<|im_end|>\n")
    assert sum(single[1]) == len(thought) + 2


def test_template_that_trims(tokenizer_with, letters):
    tokenizer = tokenizer_with(REWRITING.replace("<think>", "").replace("'] }}<", "']|trim }}<"))
    ids, supervised = encode_chat(chat("a", " b "), tokenizer, eos_token_ids={END})
    assert letters(ids) == "SuserNaENSassistantNbEN"
    assert mask_letters(supervised) == "....................^^."


def test_missing_end_of_turn_is_an_error(tiny_tokenizer, tokenizer_with):
    for tokenizer in (tiny_tokenizer, tokenizer_with(MARKED)):
        with pytest.raises(UserError, match="never stop"):
            encode_chat(chat("a", "b", "c", "d"), tokenizer, eos_token_ids={0})


def test_end_token_of_the_next_message_is_not_the_end_of_the_turn(tokenizer_with):
    template = (
        "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}"
        "{% if m['role'] == 'user' or loop.last %}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    conversation = chat("a", "b", "c", "d")
    with pytest.raises(UserError, match="rewrites assistant turns"):
        encode_chat(conversation, tokenizer_with(template), eos_token_ids={END})
    never_ends = template.replace(" or loop.last", "")
    with pytest.raises(UserError, match=r"turn 'b' with .* \(<\|im_end\|>\).* never stop"):
        encode_chat(conversation, tokenizer_with(never_ends), eos_token_ids={END})


def test_answer_that_contains_the_end_token(tiny_tokenizer):
    with pytest.raises(UserError, match=r"message 1 contains '<\|im_end\|>'"):
        encode_chat(chat("a", "x<|im_end|>y"), tiny_tokenizer, eos_token_ids={END})
    # In the user's text, or in turns that are not learnt, it does no harm.
    conversation = chat("x<|im_end|>y", "b")
    _, supervised = encode_chat(conversation, tiny_tokenizer, eos_token_ids={END})
    assert sum(supervised) == 2


def test_marked_template_that_does_not_tell_turns_apart(tokenizer_with):
    template = MARKED.replace("'assistant' %}{% gen", "'assistant' and loop.last %}{% gen")
    tokenizer = tokenizer_with(template)
    _, supervised = encode_chat(chat("a", "b", "c", "d"), tokenizer, eos_token_ids={END})
    assert sum(supervised) == 2
    with pytest.raises(UserError, match="marks 1 spans for 2 assistant turns"):
        encode_chat(chat("a", "b", "c", "d"), tokenizer, eos_token_ids={END}, last_turn_only=True)


def test_template_that_leaves_out_the_answer(tokenizer_with):
    conversation = chat("a", "<t>thought</t>b")
    drops_thought = "m['content'].split('</t>')[-1]"
    template = REWRITING.replace("m['content']", drops_thought).replace("<think>", "")
    with pytest.raises(UserError, match="rewrites assistant turns"):
        encode_chat(conversation, tokenizer_with(template), eos_token_ids={END})
    marked = MARKED.replace("%}{{ m['content']", "%}{{ " + drops_thought)
    with pytest.raises(UserError, match="leaves out a part of message 1"):
        encode_chat(conversation, tokenizer_with(marked), eos_token_ids={END})


def test_template_that_refuses_a_role(tokenizer_with):
    tokenizer = tokenizer_with("{{ raise_exception('no system role') }}")
    with pytest.raises(UserError, match="refuses roles system, user, assistant: no system role"):
        encode_chat(chat("a", "b", system="x"), tokenizer, eos_token_ids={END})


def test_tokenizer_without_template_reads_text_only(tokenizer_with, letters):
    tokenizer = tokenizer_with(None)
    with pytest.raises(UserError, match=r"no chat template.*prompt/completion"):
        encode_chat(chat("a", "b"), tokenizer, eos_token_ids={END})
    ids, supervised = encode_text(
        Text(prompt="ab", completion="cd"), tokenizer, eos_token_ids={END}
    )
    assert (letters(ids), mask_letters(supervised)) == ("abcdE", "..^^^")


@pytest.mark.parametrize(
    ("prompt", "completion", "tokens", "mask"),
    [
        ("", "abc", "abcE", ".^^^"),
        ("", "abc<|im_end|>", "abcE", ".^^^"),
        ("a", "", "aE", ".^"),
        ("", "", "E", "."),
        ("é", "a", "Ã©aE", "..^^"),
    ],
)
def test_text(tiny_tokenizer, letters, prompt, completion, tokens, mask):
    text = Text(prompt=prompt, completion=completion)
    ids, supervised = encode_text(text, tiny_tokenizer, eos_token_ids={END})
    assert (letters(ids), mask_letters(supervised)) == (tokens, mask)


def test_end_token_of_text(tiny_tokenizer):
    text = Text(completion="ab")
    assert encode_text(text, tiny_tokenizer, eos_token_ids={0, END})[0][-1] == END
    assert encode_text(text, tiny_tokenizer, eos_token_ids={0, 1})[0][-1] == 0
    with pytest.raises(UserError, match="no end-of-sequence token"):
        encode_text(text, tiny_tokenizer, eos_token_ids=())


@pytest.mark.parametrize(
    ("template", "expected"),
    [("{%- generation -%}", True), ("{% generation %}", True), ("add_generation_prompt", False)],
)
def test_has_generation_markers(template, expected):
    assert has_generation_markers(template) is expected


CONTENT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@given(contents=st.lists(CONTENT, min_size=2, max_size=6), system=st.none() | CONTENT)
@settings(max_examples=60, deadline=None)
def test_supervised_text_is_the_answers_and_their_ends(tiny_tokenizer, contents, system):
    conversation = chat(*contents, system=system)
    ids, supervised = encode_chat(conversation, tiny_tokenizer, eos_token_ids={END})
    learnt = [token for token, target in zip(ids, supervised, strict=True) if target]
    assert tiny_tokenizer.decode(learnt) == "".join(f"{c}<|im_end|>" for c in contents[1::2])
    prompt = tiny_tokenizer.apply_chat_template(
        conversation.messages[: 1 + (system is not None)],
        add_generation_prompt=True,
        return_dict=False,
    )
    assert ids[: supervised.index(True)] == prompt, "training and generation see the same prompt"
