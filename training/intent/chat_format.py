"""The tokenizer and the chat format of the bundled model.

Copying is an identity on token ids: a word has the same tokens after a space, a quote or a bracket.
So a space is its own token, except before a few function words, where nothing is copied; digits are single tokens.
"""

import re
from collections.abc import Iterator
from random import Random

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from headstart_lab.intent.intent import INTENTS, make_examples, make_preamble

SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
PAD, END = SPECIAL[:2]
MAX_POSITIONS = 2048
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)

_GLUED = (
    "a am an and are at be by can could do does for from get give have how i in into is it its me my need of on or our "
    "out please should so tell that the there this to up us user want we what when where which who will with would you"
)
_LETTERS = "A-Za-z\\u00C0-\\u024F"


def train_tokenizer(vocab_size: int, num_preambles: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of `vocab_size` tokens, trained on generated text."""
    tokenizer = Tokenizer(models.BPE())
    glued = "|".join(_GLUED.split())
    pattern = "|".join(
        (
            "[a-z]+(?:_[a-z]+)+",
            f" (?:{glued}|I)(?![{_LETTERS}_'])",
            f"[{_LETTERS}]+",
            "[0-9]",
            "\\s",
            f"[^\\s0-9{_LETTERS}]+",
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(num_preambles), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=list(SPECIAL[2:]),
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )


def preamble_text(text: str) -> str:
    """Return the system message in the model's format: `<|system|>...<|end|>`."""
    return f"<|system|>{text}{END}"


def question_text(sentence: str) -> str:
    """Return the user message and the start of the answer: `<|user|>...<|end|><|assistant|>`."""
    return f"<|user|>{sentence}{END}<|assistant|>"


def _corpus(num_preambles: int) -> Iterator[str]:
    for seed in range(num_preambles):
        preamble = make_preamble(f"tokenizer/{seed}", Random(seed).randint(4, len(INTENTS)))
        yield preamble.text
        for example in make_examples("train", 20, preamble, f"tokenizer/{seed}"):
            yield example.sentence
            yield example.answer
            yield re.sub(r"\W+", " ", example.sentence).title()
