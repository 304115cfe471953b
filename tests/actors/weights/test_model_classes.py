"""Model classes of transformers by name."""

import pytest
from transformers.models.whisper.modeling_whisper import WhisperEncoder

from raymm.actors.weights.model_classes import find_model_class
from raymm.errors import ModelError


def test_classes_are_found_only_in_transformers():
    assert find_model_class("WhisperEncoder") is WhisperEncoder
    path = "transformers.models.whisper.modeling_whisper.WhisperEncoder"
    assert find_model_class(path) is WhisperEncoder
    for name in ("os.path", "transformers.os.system", "../x", f"{path}.forward", "x.modeling_x.Y"):
        with pytest.raises(ModelError, match="accepted: a class name, or a path within"):
            find_model_class(name)
    with pytest.raises(ModelError, match="no such class; there is SiglipVisionModel"):
        find_model_class("SiglipVisonModel")
    with pytest.raises(ModelError, match="not a PreTrainedModel"):
        find_model_class("WhisperAttention")
