"""A small tokenizer for tiny checkpoints: one token per ASCII character, special tokens named as in the release."""

import string
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

from glm5_next.bridge.hf_folder import write_json

UNKNOWN = "<|unknown|>"  # ours: every character that is not in CHARACTERS
# In the order of the release, where they are the last ids, too.
SPECIAL_TOKENS = (
    UNKNOWN,
    "<|endoftext|>",
    "[MASK]",
    "[gMASK]",
    "[sMASK]",
    "<sop>",
    "<eop>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|observation|>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|image|>",
    "<|video|>",
)
CHARACTERS = "".join(sorted(string.printable))  # all of ASCII but control characters
TOKEN_IDS = {token: index for index, token in enumerate((*CHARACTERS, *SPECIAL_TOKENS))}
VOCAB_SIZE = -(-len(TOKEN_IDS) // 8) * 8  # of the model: divisible over tensor-parallel ranks
END_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def write_tokenizer(folder: Path) -> None:
    """Writes tokenizer.json and the files beside it; `transformers.AutoTokenizer` loads them."""
    characters = {character: TOKEN_IDS[character] for character in CHARACTERS}
    vocabulary = characters | {UNKNOWN: TOKEN_IDS[UNKNOWN]}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "unk_token": UNKNOWN}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token not in names.values()],
        **names,
    }
    write_json(folder / "tokenizer_config.json", config)
    write_json(folder / "special_tokens_map.json", names)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE + "\n", encoding="ascii")
