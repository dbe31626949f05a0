"""Small tokenizers with the ids of awkward strings.

Byte-level: one vocabulary is trained, and written with every pre-tokenizer as GGUF metadata; ids come from the `tokenizers` package
(with the hub's own pre-tokenizer of that family) and from llama.cpp, which must agree. SentencePiece: ids come from `sentencepiece` and
from llama.cpp.
"""

import io
import json

import gguf
import llama_cpp
import sentencepiece
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

from common import FIXTURES, write_json

OUT = FIXTURES / "tokenizers"
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and doesn't stop. It's 2024; they've 1234567 reasons, I'm sure we'll see.",
    "def main(args):\n    for i in range(10):\n\t\tprint(f\"{i:>4}\")\n\n    return {'a': 1, 'b': [2, 3]}\n",
    "Größe, naïve café, Ελληνικά, русский язык, 日本語のテキスト, 中文文本，标点。 한국어 العربية हिन्दी",
    "emoji 🙂🙃👩‍👩‍👧‍👦 🇫🇷 and symbols ©®™ ∑∫√ → ⇒ … — “quotes”",
    "the then there these those other another mother weather whether together gather rather",
]
AWKWARD = [
    "", " ", "  ", "   leading", "trailing   ", "a  b   c    d", "\n", "\n\n\n", " \n \n", "\t\ttabs\tand\nlines\r\nand\rreturns",
    "Hello, world!", "don't DON'T I'll we've it's 'quoted'", "x=1234567890", "12 345 6", "3.14159e-10", "١٢٣ ៣៤ ²³",
    "日本語のテキスト", "中文，标点。", "한국어", "Ünïcödé e\u0301 \u00e9", "🙂", "👩‍👩‍👧‍👦", "🇫🇷🇩🇪", "\u200b\u00a0\u3000\ufeff",
    "for(i=0;i<10;++i){a[i]*=2;}", "https://example.org/a?b=c&d=%20#e", "<|im_end|>", "a<|im_start|>user\nhi<|im_end|>", "<|im_",
    "<|im_end|", "ΑΒΓ αβγ", "नमस्ते", "\u0000\u0001\u007f", "!!!???...---", "a\u0300\u0301\u0302", "     \n     x", "x\n\n  y", "'S 'T 'Re",
    "don’t", "ﬁ ﬂ Å Å",
]
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
# The hub's pre-tokenizers of each family, and whether a word that is a token skips the merges.
FAMILIES = {
    "gpt-2": (ByteLevel(add_prefix_space=False, use_regex=True), None, False),
    "smollm": (Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]), None, False),
    "llama-bpe": (Sequence([Split(Regex(LLAMA3), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]), None, True),
    "qwen2": (Sequence([Split(Regex(QWEN2), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]),
              normalizers.NFC(), False),
}


def write_gguf(path, model, pre, tokens, types, merges=None, scores=None, bos=1, eos=2, add_bos=False) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    if pre:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    if merges is not None:
        writer.add_token_merges(merges)
    if scores is not None:
        writer.add_token_scores(scores)
    writer.add_bos_token_id(bos)
    writer.add_eos_token_id(eos)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(add_bos)
    # What llama.cpp asks of any model before it looks at a vocabulary.
    for add, value in [(writer.add_block_count, 1), (writer.add_context_length, 64), (writer.add_embedding_length, 32),
                       (writer.add_feed_forward_length, 32), (writer.add_head_count, 1), (writer.add_head_count_kv, 1),
                       (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_vocab_size, len(tokens))]:
        add(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_ids(path, special: bool) -> list:
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    return [model.tokenize(text.encode(), add_bos=False, special=special) for text in AWKWARD]


def byte_level() -> None:
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=CONTROL, initial_alphabet=ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    described = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(described["vocab"], key=described["vocab"].get)
    merges = [" ".join(merge) for merge in described["merges"]]
    types = [3 if token in CONTROL else 1 for token in tokens]
    out = {}
    for name, (pre, normalizer, ignore) in FAMILIES.items():
        path = OUT / f"{name}.gguf"
        write_gguf(path, "gpt2", name, tokens, types, merges)
        family = Tokenizer.from_str(tokenizer.to_str())
        family.model.ignore_merges = ignore
        family.pre_tokenizer, family.decoder = pre, decoders.ByteLevel()
        if normalizer:
            family.normalizer = normalizer
        special = [family.encode(text, add_special_tokens=False).ids for text in AWKWARD]
        family.encode_special_tokens = True
        plain = [family.encode(text, add_special_tokens=False).ids for text in AWKWARD]
        for mine, theirs in [(special, llama_ids(path, True)), (plain, llama_ids(path, False))]:
            for text, a, b in zip(AWKWARD, mine, theirs):
                if a != b:
                    print(f"{name}: tokenizers and llama.cpp differ on {text!r}: {a} {b}")
        out[name] = {"special": special, "plain": plain}
        if name == "smollm":
            (OUT / "smollm-dir").mkdir(exist_ok=True)
            family.encode_special_tokens = False
            family.save(str(OUT / "smollm-dir" / "tokenizer.json"))
    write_json(OUT / "byte-level.json", {"texts": AWKWARD, "ids": out})


def sentence_piece() -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 3), model_writer=model, model_type="bpe", vocab_size=520, byte_fallback=True,
        character_coverage=0.98, normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=True, bos_id=1, eos_id=2, unk_id=0, split_digits=True, minloglevel=2)
    pieces = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    count = pieces.get_piece_size()
    kind = lambda i: 2 if pieces.is_unknown(i) else 3 if pieces.is_control(i) else 6 if pieces.is_byte(i) else 1
    path = OUT / "spm.gguf"
    write_gguf(path, "llama", None, [pieces.id_to_piece(i) for i in range(count)], [kind(i) for i in range(count)],
               scores=[pieces.get_score(i) for i in range(count)], add_bos=True)
    ids = [pieces.encode(text) for text in AWKWARD]
    theirs = llama_ids(path, False)
    kept = []
    for text, a, b in zip(AWKWARD, ids, theirs):
        if a != b:
            print(f"spm: sentencepiece and llama.cpp differ on {text!r}: {a} {b}")
        else:
            kept.append((text, a))
    write_json(OUT / "spm.json", {"texts": [text for text, _ in kept], "ids": [ids for _, ids in kept]})


if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    byte_level()
    sentence_piece()
