"""English text for the `setup.diff` of the language programs: the reference pages that Python ships."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np

from benchmarks.ported.reduced import SEED  # which also makes torchvision importable

__all__ = ["SEED", "text", "write_characters", "write_language_model", "write_translation_model", "write_words"]


def text(begin: int, end: int) -> str:
    """Characters of the pages, without the markup that is in none of them alone."""
    pages = (topics[name] for name in sorted(topics))
    return re.sub(r"[^\x20-\x7e\n]", "", "\n".join(pages))[begin:end]


def write_characters(folder: str) -> str:
    """Writes train.bin, val.bin and meta.pkl as nanoGPT's prepare.py does. Returns the folder."""
    Path(folder).mkdir(exist_ok=True)
    characters = sorted(set(text(0, 450_000)))
    for name, begin, end in (("train", 0, 400_000), ("val", 400_000, 450_000)):
        codes = [characters.index(each) for each in text(begin, end)]
        np.array(codes, dtype=np.uint16).tofile(Path(folder, f"{name}.bin"))
    Path(folder, "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(characters)}))
    return folder


def write_words(folder: str, known: int = 1500) -> str:
    """Writes train.txt, valid.txt and test.txt, a sentence a line, its words and marks apart; rare ones become <unk>. Returns
    the folder."""
    Path(folder).mkdir(exist_ok=True)
    words = [re.findall(r"\w+|[^\w\s]", line) for line in text(0, 450_000).splitlines() if line.strip()]
    counts: dict[str, int] = {}
    for line in words:
        for word in line:
            counts[word] = counts.get(word, 0) + 1
    common = set(sorted(counts, key=lambda word: (-counts[word], word))[:known])
    lines = [" ".join(word if word in common else "<unk>" for word in line) for line in words]
    parts = np.array_split(np.arange(len(lines)), 10)
    for name, rows in (("train", np.concatenate(parts[:8])), ("valid", parts[8]), ("test", parts[9])):
        Path(folder, f"{name}.txt").write_text("\n".join(lines[row] for row in rows) + "\n", encoding="utf-8")
    return folder


def write_language_model(folder: str, known: int = 1500) -> str:
    """Writes the words of `write_words`, and a tokenizer and an untrained GPT-2 that know them, as Transformers saves them, and
    keeps the libraries of Hugging Face off the network. Call it before importing them. Returns the folder."""
    os.environ |= {"HF_HOME": str(Path(folder, "cache").resolve()), "HF_HUB_OFFLINE": "1"}
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    write_words(folder, known)
    words = Path(folder, "train.txt").read_text(encoding="utf-8").split()
    numbers = {word: number for number, word in enumerate(["<pad>", "<unk>", *sorted(set(words) - {"<unk>"})])}
    split = Tokenizer(WordLevel(numbers, unk_token="<unk>"))
    split.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=split, unk_token="<unk>", pad_token="<pad>", model_max_length=256)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(numbers), n_positions=64, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0, pad_token_id=0
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def write_translation_model(folder: str, data: str, known: int = 500) -> None:
    """Writes a tokenizer and an untrained T5, and sentences in `data` that say whether they speak of a name or of none."""
    write_language_model(folder, known)
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    Path(data).mkdir(parents=True)
    for source, target, count in (("train", "train", 1280), ("valid", "val", 512)):
        lines = Path(folder, f"{source}.txt").read_text(encoding="utf-8").splitlines()
        rows = [
            {"sentence": line, "label": "is" if "<unk>" in line.split()[:20] else "not"}
            for line in lines
            if len(line.split()) > 8
        ]
        Path(data, f"financial_phrase_bank_{target}.jsonl").write_text("\n".join(map(json.dumps, rows[:count])))
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=known + 2, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, pad_token_id=0,
        decoder_start_token_id=0, eos_token_id=0,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(folder)
