"""Prints what a server caches and forgets, as it happens: a KV event consumer in one file.

headstart serve --kv-events-config \\
    '{"enable_kv_cache_events": true, "endpoint": "ipc:///tmp/kv-events", "replay_endpoint": "ipc:///tmp/kv-replay"}'
python examples/kv_events/watch.py ipc:///tmp/kv-events --replay ipc:///tmp/kv-replay     # in another shell

It keeps an index (block hash -> parent, tokens) like a router would: it begins with everything the replay socket still
has, and asks it again whenever a sequence number is missing. vLLM's events are read just as well.
"""

import argparse
import contextlib
from collections.abc import Iterator
from typing import Any

import msgspec
import zmq

END = (-1).to_bytes(8, "big", signed=True)


def replay(context: "zmq.Context[Any]", endpoint: str, start: int) -> Iterator[tuple[int, bytes]]:
    """The batches from number `start` on that the server still keeps: (number, payload)."""
    with context.socket(zmq.DEALER) as sock:
        sock.connect(endpoint)
        sock.send_multipart((b"", start.to_bytes(8, "big")))
        while sock.poll(2000):
            *_, number, payload = sock.recv_multipart()  # older engines send no topic frame
            if number == END:
                return
            yield int.from_bytes(number, "big"), payload
    print("the replay socket does not answer")


class Index:
    """What the server has, from its events."""

    def __init__(self) -> None:
        self.blocks: dict[bytes | int, tuple[bytes | int | None, list[int]]] = {}
        self.next = 0  # number of the batch that is due

    def take(self, number: int, payload: bytes) -> None:
        """Applies a batch, unless it is known already."""
        if number < self.next:
            return
        if number > self.next:
            print(f"! batches {self.next} to {number - 1} are lost: this index may be wrong until the next reset")
        self.next = number + 1
        for event in msgspec.msgpack.decode(payload)[1]:
            match event["type"]:
                case "BlockStored":
                    self._store(event)
                case "BlockRemoved":
                    for name in event["block_hashes"]:
                        self.blocks.pop(name, None)
                    print(f"#{number} removed {len(event['block_hashes'])} blocks; {len(self.blocks)} are left")
                case "AllBlocksCleared":
                    self.blocks.clear()
                    print(f"#{number} all blocks cleared")

    def _store(self, event: dict[str, Any]) -> None:
        size, parent = event["block_size"], event["parent_block_hash"]
        under = "at the start" if parent is None else f"under {short(parent)}"
        for index, name in enumerate(event["block_hashes"]):
            tokens = event["token_ids"][index * size : (index + 1) * size]
            self.blocks[name] = (parent, tokens)
            parent = name
        tokens = event["token_ids"]
        print(
            f"#{self.next - 1} stored {len(event['block_hashes'])} blocks {under} on {event['medium']}: tokens "
            f"{tokens[:4]}...{tokens[-2:]}; {len(self.blocks)} in all"
        )


def short(name: bytes | int) -> str:
    """The first hex digits of a block's name."""
    return name.hex()[:8] if isinstance(name, bytes) else f"{name:016x}"[:8]


def main() -> None:
    """Subscribes, replays what was before, and prints until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("endpoint", help="such as tcp://127.0.0.1:5557")
    parser.add_argument("--replay", help="such as tcp://127.0.0.1:5558")
    parser.add_argument("--topic", default="", help="prefix of the topics to hear (default: all)")
    options = parser.parse_args()
    with zmq.Context() as context, context.socket(zmq.SUB) as sub:
        sub.setsockopt(zmq.SUBSCRIBE, options.topic.encode())
        sub.connect(options.endpoint)
        index = Index()
        if options.replay:
            for number, payload in replay(context, options.replay, 0):
                index.take(number, payload)
        print(f"listening to {options.endpoint} from batch {index.next} on; Ctrl-C ends", flush=True)
        while True:
            _, seq, payload = sub.recv_multipart()
            number = int.from_bytes(seq, "big")
            if number > index.next and options.replay:
                for missed in replay(context, options.replay, index.next):
                    index.take(*missed)
            index.take(number, payload)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
