"""Vision, audio, multimodal and time series models of transformers in small random configurations."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.zoo_models.language import PAIR, TEXT, make
from benchmarks.zoo_models.workload import PICTURES, SIZES, VOCABULARY, Batch, Built, Sizes, add, ids, labels, workload

BLOCKS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
PATCHES = {**BLOCKS, "image_size": 32, "patch_size": 8}
SINGLE = {"num_labels": 3, "problem_type": "single_label_classification"}  # transformers would note it at the first step: a recompile
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
CONVNEXT = {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}
LEVIT = {"hidden_sizes": [16, 24, 32], "num_attention_heads": [2, 3, 4], "depths": [1, 1, 1], "key_dim": [8, 8, 8], "image_size": 64}
POOLFORMER = {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1]}
CVT = {"embed_dim": [8, 16, 16], "num_heads": [1, 2, 2], "depth": [1, 2, 3], "drop_path_rate": [0.0, 0.0, 0.1]}
# With transformers' smaller weights nothing but rounding reaches the last layers, and eager's own gradients are off by parts in a hundred.
MOBILENET = {"depth_multiplier": 0.25, "initializer_range": 0.15}
EFFICIENTNET = {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320}
SEGFORMER: dict[str, Any] = {"hidden_sizes": [8, 8, 16, 16], "num_attention_heads": [1, 1, 2, 2], "depths": [1, 1, 1, 1], "decoder_hidden_size": 16}

# name: (model class, configuration class, its settings, side of a picture: a number, or "x3" for three times the length; sizes)
IMAGE_CLASSIFIERS: dict[str, tuple[str, str, dict[str, Any], int | str, Sizes]] = {
    "vit": ("ViTForImageClassification", "ViTConfig", {**PATCHES, "hidden_dropout_prob": 0.1}, 32, SIZES),
    "deit": ("DeiTForImageClassification", "DeiTConfig", PATCHES, 32, SIZES),
    "beit": ("BeitForImageClassification", "BeitConfig", {**PATCHES, "use_relative_position_bias": True}, 32, SIZES),
    "dinov2": ("Dinov2ForImageClassification", "Dinov2Config", PATCHES, 32, SIZES),
    "swin": ("SwinForImageClassification", "SwinConfig", SWIN, 32, SIZES),
    "swinv2": ("Swinv2ForImageClassification", "Swinv2Config", SWIN, 32, SIZES),
    "convnext": ("ConvNextForImageClassification", "ConvNextConfig", CONVNEXT, "x4", SIZES),
    "convnextv2": ("ConvNextV2ForImageClassification", "ConvNextV2Config", CONVNEXT, "x4", SIZES),
    "resnet": ("ResNetForImageClassification", "ResNetConfig", {**RESNET, "layer_type": "basic"}, "x6", PICTURES),
    "resnet_bottleneck": ("ResNetForImageClassification", "ResNetConfig", RESNET, "x6", PICTURES),
    "regnet": ("RegNetForImageClassification", "RegNetConfig", {**RESNET, "groups_width": 8}, "x6", PICTURES),
    "mobilenet_v1": ("MobileNetV1ForImageClassification", "MobileNetV1Config", MOBILENET, "x6", PICTURES),
    "mobilenet_v2": ("MobileNetV2ForImageClassification", "MobileNetV2Config", MOBILENET, "x6", PICTURES),
    "efficientnet": ("EfficientNetForImageClassification", "EfficientNetConfig", EFFICIENTNET, "x6", PICTURES),
    "levit": ("LevitForImageClassification", "LevitConfig", LEVIT, 64, PICTURES),
    "poolformer": ("PoolFormerForImageClassification", "PoolFormerConfig", POOLFORMER, "x4", SIZES),
    "cvt": ("CvtForImageClassification", "CvtConfig", CVT, "x4", PICTURES),
}


def _pictures(side: int | str) -> Batch:
    """float32 (batch, 3, side, side)."""

    def make_batch(batch: int, length: int) -> dict[str, Any]:
        pixels = side if isinstance(side, int) else int(side[1:]) * length
        return {"pixel_values": torch.randn(batch, 3, pixels, pixels), "labels": labels(batch, classes=3)}

    return make_batch


def _image_classifier(model: str, config: str, settings: dict[str, Any], side: int | str) -> Built:
    return make(model, config, {**settings, **SINGLE}), _pictures(side)


for _name, (_model, _config, _settings, _side, _sizes) in IMAGE_CLASSIFIERS.items():
    _build = lambda row=(_model, _config, _settings, _side): _image_classifier(*row)  # noqa: E731
    add(_name, "transformers: vision", _build, sizes=_sizes)


@workload("transformers: vision", sizes=PICTURES)
def segformer() -> Built:
    """Segmentation: transformer encoder, upsampled features, one class per pixel."""
    model = make("SegformerForSemanticSegmentation", "SegformerConfig", {**SEGFORMER, "num_labels": 3})
    return model, lambda batch, length: {
        "pixel_values": torch.randn(batch, 3, 4 * length, 4 * length),
        "labels": labels(batch, 4 * length, 4 * length, classes=3),
    }


@workload("transformers: vision")
def vit_mae() -> Built:
    """A masked autoencoder: random patches by sorting noise."""
    settings = {"decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2, "decoder_intermediate_size": 32}
    return make("ViTMAEForPreTraining", "ViTMAEConfig", {**PATCHES, **settings}), lambda batch, _: {"pixel_values": torch.randn(batch, 3, 32, 32)}


class Detector(torch.nn.Module):
    """YOLOS without its Hungarian matching, which needs scipy: queries are matched in order."""

    def __init__(self) -> None:
        super().__init__()
        settings = {**BLOCKS, "image_size": [32, 32], "patch_size": 8, "num_detection_tokens": 5, "num_labels": 3}
        self.network = make("YolosForObjectDetection", "YolosConfig", settings)

    def forward(self, pixel_values: torch.Tensor, classes: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
        """`classes` int64 (batch, 5), `boxes` float32 (batch, 5, 4): centre and size."""
        output = self.network(pixel_values)
        loss = torch.nn.functional.cross_entropy(output.logits.flatten(0, 1), classes.flatten())
        return loss + torch.nn.functional.l1_loss(output.pred_boxes, boxes)


@workload("transformers: vision")
def yolos() -> Built:
    """Object detection with query tokens."""
    return Detector(), lambda batch, _: {
        "pixel_values": torch.randn(batch, 3, 32, 32),
        "classes": labels(batch, 5, classes=4),
        "boxes": torch.rand(batch, 5, 4),
    }


SPEECH = {**BLOCKS, "vocab_size": 20, "conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
SPEECH |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "layerdrop": 0.0}
WHISPER = {**PAIR, "max_source_positions": 20, "num_mel_bins": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _speech(model: str, config: str, **settings: Any) -> Built:
    return make(model, config, {**SPEECH, **settings}), lambda batch, length: {
        "input_values": torch.randn(batch, 50 * length),
        "labels": torch.randint(1, 20, (batch, 5)),
    }


add("wav2vec2", "transformers: audio", lambda: _speech("Wav2Vec2ForCTC", "Wav2Vec2Config", mask_time_prob=0.0))
add(
    "wav2vec2_masked",
    "transformers: audio",
    lambda: _speech("Wav2Vec2ForCTC", "Wav2Vec2Config", mask_time_prob=0.3, mask_time_length=2),
    dynamo={"use_numpy_random_stream": True},  # masks are drawn with numpy: Dynamo would draw others with PyTorch
)
add("hubert", "transformers: audio", lambda: _speech("HubertForCTC", "HubertConfig", mask_time_prob=0.0))


@workload("transformers: audio")
def whisper() -> Built:
    """Speech to text: the encoder's length is fixed by its position embeddings, the decoder's is not."""
    model = make("WhisperForConditionalGeneration", "WhisperConfig", {**WHISPER, "decoder_start_token_id": 1, "max_target_positions": 64})
    return model, lambda batch, length: {"input_features": torch.randn(batch, 16, 40), "labels": ids(batch, length)}


@workload("transformers: audio")
def spectrogram_transformer() -> Built:
    """Classification of mel spectrograms."""
    settings = {**BLOCKS, "patch_size": 8, "max_length": 48, "num_mel_bins": 16, "frequency_stride": 8, "time_stride": 8}
    model = make("ASTForAudioClassification", "ASTConfig", {**settings, **SINGLE})
    return model, lambda batch, _: {"input_values": torch.randn(batch, 48, 16), "labels": labels(batch, classes=3)}


TEXT_TOWER = {**TEXT, "max_position_embeddings": 32}


def _two_towers(model: str, config: str, **text: Any) -> Built:
    settings = {"text_config": {**TEXT_TOWER, **text}, "vision_config": PATCHES, "projection_dim": 16}
    return make(model, config, settings), lambda batch, length: {
        "input_ids": ids(batch, length),
        "pixel_values": torch.randn(batch, 3, 32, 32),
        "return_loss": True,
    }


add("clip", "transformers: multimodal", lambda: _two_towers("CLIPModel", "CLIPConfig", eos_token_id=VOCABULARY - 1))
add("siglip", "transformers: multimodal", lambda: _two_towers("SiglipModel", "SiglipConfig", projection_size=32))
add("blip", "transformers: multimodal", lambda: _two_towers("BlipModel", "BlipConfig", eos_token_id=VOCABULARY - 1))


@workload("transformers: multimodal")
def vilt() -> Built:
    """Text and picture in one encoder."""
    model = make("ViltForQuestionAnswering", "ViltConfig", {**PATCHES, **TEXT_TOWER, "num_labels": 3, "max_image_length": -1})
    return model, lambda batch, length: {
        "input_ids": ids(batch, length),
        "pixel_values": torch.randn(batch, 3, 32, 32),
        "labels": torch.rand(batch, 3),
    }


PATCHTST = {"context_length": 32, "patch_length": 8, "patch_stride": 8, "d_model": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
SERIES = {"prediction_length": 8, "num_input_channels": 2}
RNN_LIKE = {"prediction_length": 8, "context_length": 16, "lags_sequence": [1, 2], "num_time_features": 1, "d_model": 16, "encoder_layers": 1}
RNN_LIKE |= {"decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}


def _forecast(batch: int, _: int) -> dict[str, Any]:
    return {"past_values": torch.randn(batch, 32, 2), "future_values": torch.randn(batch, 8, 2)}


add(
    "patchtst",
    "transformers: time series",
    lambda: (make("PatchTSTForPrediction", "PatchTSTConfig", {**PATCHTST, **SERIES, "ffn_dim": 32}), _forecast),
)
add(
    "patchtsmixer",
    "transformers: time series",
    lambda: (make("PatchTSMixerForPrediction", "PatchTSMixerConfig", {**PATCHTST, **SERIES, "num_layers": 2}), _forecast),
)


def _with_times(batch: int, _: int) -> dict[str, Any]:
    """Eighteen past values (the context and the longest lag), eight future ones, and the time of each."""
    return {
        "past_values": torch.randn(batch, 18),
        "past_time_features": torch.randn(batch, 18, 1),
        "past_observed_mask": torch.ones(batch, 18),
        "future_values": torch.randn(batch, 8),
        "future_time_features": torch.randn(batch, 8, 1),
    }


add(
    "time_series_transformer",
    "transformers: time series",
    lambda: (make("TimeSeriesTransformerForPrediction", "TimeSeriesTransformerConfig", RNN_LIKE), _with_times),
)
add(
    "informer",
    "transformers: time series",
    lambda: (make("InformerForPrediction", "InformerConfig", {**RNN_LIKE, "sampling_factor": 2}), _with_times),
)
add(
    "autoformer",
    "transformers: time series",
    lambda: (make("AutoformerForPrediction", "AutoformerConfig", {**RNN_LIKE, "label_length": 4}), _with_times),
)
