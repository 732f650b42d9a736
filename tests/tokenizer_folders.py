"""Small real tokenizers, built in a moment: byte-level BPE, sentencepiece-style BPE with byte fallback, and Unigram."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "the quick brown fox jumps over the lazy dog and runs away from the big bad bear",
    "play some music in the living room, please; set an alarm for 7:30 tomorrow",
    "é è ü ö naïve café — déjà vu… “quoted” 東京 大阪 こんにちは 世界 👋🏽 🎉 ñandú Привет мир",
    "def main():\n    return {'key': [1, 2, 3]}\n\n\t# done   with   spaces",
] * 3
BYTE_LEVEL, METASPACE, UNIGRAM = "byte-level", "metaspace", "unigram"
KINDS = (BYTE_LEVEL, METASPACE, UNIGRAM)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build(kind: str) -> Tokenizer:
    """Returns a tokenizer of about 500 tokens; "<|im_start|>" and "<|im_end|>" are special in all of them."""
    if kind == BYTE_LEVEL:
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=450,
            special_tokens=["<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        tokenizer.train_from_iterator(CORPUS, trainer)
        tokenizer.add_tokens([AddedToken("plain added", special=False), AddedToken("東西", special=False)])
        return tokenizer
    if kind == METASPACE:
        return _llama_style()
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"],
        unk_token="<unk>",
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def _llama_style() -> Tokenizer:
    """As Llama 2's: blanks are U+2581, unknown characters fall back to bytes, <s> stands before every text."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()  # for the training alone: merges stay within words
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=specials, limit_alphabet=50, max_token_length=8, show_progress=False
    )
    trained.train_from_iterator(CORPUS, trainer)
    document = json.loads(trained.to_str())
    document["added_tokens"] = document["added_tokens"][:3]  # the byte tokens are part of the vocabulary proper
    document["model"] |= {"byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True}
    tokenizer = Tokenizer.from_str(json.dumps(document | {"pre_tokenizer": None}))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return tokenizer


def write(folder: Path, kind: str, **config: Any) -> Path:
    """Writes a model folder's tokenizer files and returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    build(kind).save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | config), encoding="utf-8")
    return folder
