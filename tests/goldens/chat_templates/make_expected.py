"""Make tokenizer.json and expected.json with transformers (`pip install transformers`): what its apply_chat_template gives.

Run it in this folder. The tokenizer has one id per byte and the special tokens of all templates.
"""

import importlib
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

transformers = importlib.import_module("transformers")  # no dependency of the tests, which only read what this wrote

EOS = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>"}
BOS = {"chatml": "<s>", "llama3": "<|begin_of_text|>", "mistral": "<s>", "gemma": "<bos>"}
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
SPECIAL += ["<|eot_id|>", "[INST]", "[/INST]", "<bos>", "<start_of_turn>", "<end_of_turn>"]
TURNS = {
    "one": [("user", "Hello there!")],
    "system": [("system", "Be brief & <kind>."), ("user", "  Hello\n")],
    "several": [("user", "a"), ("assistant", "b é 🐈"), ("user", "c \"quoted\" 'text'")],
    "spaces": [("user", " \t a \n"), ("assistant", " b "), ("user", "\nc")],
    "empty": [("user", "")],
    "wrong": [("assistant", "I begin"), ("assistant", "twice")],
}


def main() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    made.add_special_tokens([AddedToken("<|strip|>", special=True, normalized=False, lstrip=True, rstrip=True)])
    made.save("tokenizer.json")
    expected = {"transformers": transformers.__version__, "eos": EOS, "bos": BOS, "cases": []}
    templates = {path.stem: path.read_text() for path in sorted(Path().glob("*.jinja"))}
    templates["strip"] = "{% for m in messages %}{{ m.content }} <|strip|> {% endfor %}<|im_start|>"
    for name, source in templates.items():
        tokens = {"bos_token": BOS.get(name, "<s>"), "eos_token": EOS.get(name, "</s>")}
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=made, chat_template=source, **tokens)
        for turns, pairs in TURNS.items():
            chat = [{"role": role, "content": content} for role, content in pairs]
            try:
                text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
                ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
            except Exception as error:
                text, ids = None, str(error)
            case = {"template": name, "source": source, "turns": turns, "messages": pairs, "text": text, "ids": ids}
            expected["cases"].append(case)
    Path("expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


main()
