"""A tokenizer and a model on disk, for what starts from text."""

from itertools import islice
from pathlib import Path

from models import tiny_llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hf_sparse_prr.demo.passkey import island

CHAT = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}[assistant]"


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE of 400 tokens, trained on the text of the demo."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    sentences = list(islice(island(), 200))
    tokenizer.train_from_iterator(sentences, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def save_llama(folder: Path, chat: bool = False) -> Path:
    """A tiny Llama that reads the tokenizer's 400 tokens, and the tokenizer."""
    tiny_llama(vocab_size=400, max_position_embeddings=1024).save_pretrained(folder)
    tokenizer = tiny_tokenizer()
    if chat:
        tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    return folder
