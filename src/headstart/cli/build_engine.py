"""build_engine: the function that the engine process calls. Importing this module does not import torch."""

from headstart.config.options import EngineOptions
from headstart.core.engine import Engine
from headstart.core.engine_info import EngineInfo
from headstart.model.setup.threads import configure_num_threads


def build_engine(options: EngineOptions) -> tuple[Engine, EngineInfo]:
    """Call assembly.build_engine, imported here after setting the threads and after the checks that need no torch."""
    configure_num_threads(options.threads)
    from headstart.engine.engine_checks import checked_model_folder

    folder = checked_model_folder(options)
    _leave_out_distributed()
    from headstart.engine.assembly import build_engine as build

    return build(options, folder)


def _leave_out_distributed() -> None:
    """Let Transformers believe that torch has no distributed tensors: importing them takes 0.6 s of CPU time."""
    import torch.distributed
    from transformers.utils.import_utils import is_torch_distributed_available

    is_available = torch.distributed.is_available
    torch.distributed.is_available = lambda: False
    try:
        is_torch_distributed_available()  # remembers its answer
    finally:
        torch.distributed.is_available = is_available
