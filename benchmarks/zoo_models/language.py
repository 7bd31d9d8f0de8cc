"""Language models of transformers in small random configurations: encoders, decoders, encoder-decoders."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers

from benchmarks.zoo_models.workload import VOCABULARY, Built, add, ids, labels

TEXT = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
GROUPED = {**TEXT, "num_key_value_heads": 2}
_PAIR = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
}
PAIR = {**_PAIR, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 64}
MOE = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2}
SHORT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 1}
OPT = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64, "word_embed_proj_dim": 32}
XLNET = {"vocab_size": VOCABULARY, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}
DISTIL = {"vocab_size": VOCABULARY, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64}
T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
BLOOM = {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4}
MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
MAMBA2 = {**MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}
FALCON = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
NEO = {**TEXT, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 8, "max_position_embeddings": 64}
MODERN = {**TEXT, "global_attn_every_n_layers": 2, "local_attention": 8, "pad_token_id": 0}

# name: (model class, configuration class, its settings)
ENCODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", "BertConfig", TEXT),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", TEXT),
    "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig", DISTIL),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {**TEXT, "embedding_size": 16}),
    "electra": ("ElectraForMaskedLM", "ElectraConfig", {**TEXT, "embedding_size": 16}),
    "deberta_v2": ("DebertaV2ForMaskedLM", "DebertaV2Config", {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "xlnet": ("XLNetLMHeadModel", "XLNetConfig", XLNET),
    "mpnet": ("MPNetForMaskedLM", "MPNetConfig", TEXT),
    "modernbert": ("ModernBertForMaskedLM", "ModernBertConfig", MODERN),
    "fnet": ("FNetForMaskedLM", "FNetConfig", TEXT),
}
DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", SHORT),
    "gpt_neo": ("GPTNeoForCausalLM", "GPTNeoConfig", NEO),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", TEXT),
    "gptj": ("GPTJForCausalLM", "GPTJConfig", {**SHORT, "rotary_dim": 4}),
    "opt": ("OPTForCausalLM", "OPTConfig", OPT),
    "bloom": ("BloomForCausalLM", "BloomConfig", BLOOM),
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "llama_eager_attention": ("LlamaForCausalLM", "LlamaConfig", {**GROUPED, "attn_implementation": "eager", "attention_dropout": 0.1}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 8}),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 8}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", {**GROUPED, "head_dim": 8}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", {**GROUPED, "head_dim": 8}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", {**GROUPED, "head_dim": 8, "sliding_window": 8}),
    "phi": ("PhiForCausalLM", "PhiConfig", TEXT),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**GROUPED, "pad_token_id": 0}),
    "falcon": ("FalconForCausalLM", "FalconConfig", FALCON),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", GROUPED),
    "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**GROUPED, "num_local_experts": 4}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {**GROUPED, **MOE}),
    "mamba": ("MambaForCausalLM", "MambaConfig", MAMBA),
    "mamba2": ("Mamba2ForCausalLM", "Mamba2Config", MAMBA2),
}
ENCODER_DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "bart": ("BartForConditionalGeneration", "BartConfig", PAIR),
    "pegasus": ("PegasusForConditionalGeneration", "PegasusConfig", PAIR),
    "marian": ("MarianMTModel", "MarianConfig", {**PAIR, "pad_token_id": 0, "decoder_start_token_id": 0}),
}


def make(model: str, config: str, settings: dict[str, Any]) -> torch.nn.Module:
    """A model of transformers with random weights."""
    return getattr(transformers, model)(getattr(transformers, config)(**settings))


def _language_model(model: str, config: str, settings: dict[str, Any]) -> Callable[[], Built]:
    return lambda: (make(model, config, settings), lambda batch, length: {"input_ids": ids(batch, length), "labels": ids(batch, length)})


def _sequence_to_sequence(model: str, config: str, settings: dict[str, Any]) -> Callable[[], Built]:
    return lambda: (make(model, config, settings), lambda batch, length: {"input_ids": ids(batch, length), "labels": ids(batch, length - 4)})


def _padding(batch: int, length: int) -> torch.Tensor:
    """An attention mask, int64 (batch, length): the last two tokens of every second text are padding."""
    mask = torch.ones(batch, length, dtype=torch.int64)
    mask[::2, -2:] = 0
    return mask


def _padded_classifier() -> Built:
    model = make("BertForSequenceClassification", "BertConfig", {**TEXT, "num_labels": 3, "problem_type": "single_label_classification"})
    return model, lambda batch, length: {
        "input_ids": ids(batch, length),
        "attention_mask": _padding(batch, length),
        "labels": labels(batch, classes=3),
    }


def _question_answering() -> Built:
    model = make("BertForQuestionAnswering", "BertConfig", TEXT)
    return model, lambda batch, length: {
        "input_ids": ids(batch, length),
        "start_positions": labels(batch, classes=length),
        "end_positions": labels(batch, classes=length),
    }


def _padded_llama() -> Built:
    model = make("LlamaForCausalLM", "LlamaConfig", GROUPED)
    return model, lambda batch, length: {
        "input_ids": ids(batch, length),
        "attention_mask": _padding(batch, length),
        "labels": ids(batch, length),
    }


def _checkpointed_llama() -> Built:
    model = make("LlamaForCausalLM", "LlamaConfig", {**GROUPED, "use_cache": False})
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    return model, lambda batch, length: {"input_ids": ids(batch, length), "labels": ids(batch, length)}


for _name, _row in ENCODERS.items():
    add(_name, "transformers: encoders", _language_model(*_row))
add("bert_classifier", "transformers: encoders", _padded_classifier)
add("bert_qa", "transformers: encoders", _question_answering)
for _name, _row in DECODERS.items():
    add(_name, "transformers: decoders", _language_model(*_row))
add("llama_padded", "transformers: decoders", _padded_llama)
add("llama_checkpointed", "transformers: decoders", _checkpointed_llama)
for _name, _row in ENCODER_DECODERS.items():
    add(_name, "transformers: encoder-decoders", _sequence_to_sequence(*_row))
