"""A Transformers model on planes to a folder, and back.

The folder is the one that `gnomon apply nf12` writes: plain Transformers refuses it, `import gnomon.hf` reads it.
To convert a checkpoint use that command, which needs memory for one tensor only.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from gnomon.core.errors import UsageError

from .container import is_plane
from .model import refuse_to_save
from .modules import NF12Weight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TYPE = "gnomon_nf12"


def save_nf12(
    model: PreTrainedModel, folder: str | Path, *, min_elements: int | None = None, force: bool = False
) -> None:
    """Write a model that :func:`compress_model` made, or that was loaded from such a folder, losslessly.

    A model compressed in memory goes through an ordinary checkpoint beside `folder`, which is removed again: that
    takes the space of the BF16 weights for a moment, in memory and on the disk. The tokenizer is not the model's;
    save it to the same folder.

    Args:
        min_elements: smallest matrix stored as planes; by default the smallest that the model has on planes.
        force: replace what stands there, if it is a model. A model that was loaded from such a folder writes into
            what stands there, as `save_pretrained` does.

    Raises:
        UsageError: no NF12 layers, or `folder` may not be written.
    """
    on_planes = [module for module in model.modules() if isinstance(module, NF12Weight)]
    if not on_planes:
        raise UsageError(
            f"{type(model).__name__} has no NF12 layers. Call compress_model first, or convert its folder: "
            "gnomon apply nf12 --model M --out D"
        )
    folder = Path(folder)
    if vars(model).get("save_pretrained") is not refuse_to_save:
        if not force and folder.is_dir() and any(folder.iterdir()):
            raise UsageError(
                f"{folder} exists and is not empty. Choose another folder or pass force=True to write into it."
            )
        model.save_pretrained(folder)  # loaded through gnomon.hf, which gave it a way to save itself
        return
    from gnomon.core.applying import Source, apply_method
    from gnomon.core.checkpoints import open_checkpoint
    from gnomon.core.targets import existing_parent

    from .apply import METHOD, NF12Settings

    smallest = min(module.shape.numel() for module in on_planes)
    settings = NF12Settings(min_elements=smallest if min_elements is None else min_elements)
    name = Path(str(model.name_or_path or type(model).__name__)).name
    with tempfile.TemporaryDirectory(dir=existing_parent(folder), prefix=f".{folder.name}-dense-") as dense:
        type(model).save_pretrained(model, dense, state_dict=decoded_state(model))
        apply_method(METHOD, Source(name, open_checkpoint(Path(dense))), folder, settings, force=force)


def load_nf12(folder: str | Path, *, dtype: Any = "auto", device: str | None = None) -> PreTrainedModel:
    """The causal language model that a folder in NF12 form holds, in evaluation mode.

    Args:
        folder: from :func:`save_nf12` or `gnomon apply nf12`.
        dtype: of what isn't on planes and of activations; "auto" is the checkpoint's. Planes are never cast.
        device: by default the CPU.

    Raises:
        UsageError: no such folder, dtype or device, or a model in another form.
        GnomonError: a damaged folder.
    """
    import transformers

    from gnomon.core.files import read_json
    from gnomon.core.models import as_device, as_dtype, require

    where = as_device(device or "cpu")
    dtype = dtype if dtype == "auto" else as_dtype(dtype, where)
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} is no folder with a config.json. gnomon apply nf12 writes one.")
    require(str(folder))  # refuses damaged folders, and lets Transformers know Gnomon's
    if (found := read_json(folder / "config.json").get("model_type")) != TYPE:
        raise UsageError(
            f"{folder} is of type {found!r}, not {TYPE}. Load it with Transformers and call compress_model, or "
            "convert it: gnomon apply nf12 --model M --out D"
        )
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, local_files_only=True, trust_remote_code=False
    )
    return model.eval().to(where)


def decoded_state(model: nn.Module) -> dict[str, Tensor]:
    """The state dict that the model would have without planes; what is shared stays shared."""
    state = {key: value for key, value in model.state_dict().items() if not is_plane(key)}
    decoded: dict[int, Tensor] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, NF12Weight):
            if id(module) not in decoded:
                decoded[id(module)] = module.tensor.decode().to(module.dtype)
            state[name] = decoded[id(module)]
    return state
