"""Signatures of torch.distributed: its collectives, its store and rendezvous, gloo.

In: nothing. Out: COLLECTIVES, RENDEZVOUS, CONNECTIONS; CLASSES, by the name of an exception's class alone.
"""

from __future__ import annotations

from remote_agent.diagnose.signatures.signature import WRONG_SIZE, ended, failed, lost, told, waited

COLLECTIVES = (
    failed(
        "collective_desync",
        r"op\.preamble\.length <= op\.nbytes",
        title=WRONG_SIZE,
        hint="another rank called this collective with another size; TORCH_DISTRIBUTED_DEBUG=DETAIL names it",
    ),
    failed("collective_desync", r"Mismatched collective detected.*around rank (?P<peer>\d+)"),
    waited(
        "hang_no_output",
        *(
            "there are other ranks that didn't finish",
            "[Nn]o progress (?:on|of|in|for)",
            "[Nn]o heartbeats? from (?:one|some)",
            "[Ss]till waiting after",
        ),
    ),
    failed(
        "collective_desync",
        r"Ranks? (?P<rank>\d+(?:, \d+)*) failed to pass monitoredBarrier",
        title="did not reach monitoredBarrier",
    ),
    lost("gloo_connection_reset", r"received errors while waiting for send/recv from rank (?P<peer>\d+)"),
    waited("collective_desync", r"check rank (?P<peer>\d+) logs for faulty rank"),
    failed(
        "collective_desync",
        r"Detected mismatch between collectives[\s\S]{0,2000}?but Rank (?P<peer>\d+) is running",
        "Detected mismatch between collectives",
        "Mismatch between collective operation types",
        "sequence number .* doesn.t match",
    ),
    failed("collective_desync", r"appears not to match \w+ of the same param in process (?P<base>\d+)"),
    failed(
        "collective_desync",
        "DDP expects same model across all ranks",
        r"disagreement between rank(?P<peer>0) and rank\d",
        "Expected to have finished reduction in the prior iteration",
    ),
)
RENDEZVOUS = (
    failed(
        "port_in_use",
        # NCCL's RAS service is excluded: all jobs of a host share its port, and NCCL runs without it.
        r"(?m:^(?!.*ras/(?<!\wras/)).*Address already in use)",
        "EADDRINUSE",
        "Only one usage of each socket address",
        r"errno: 98\b",
        title="the port is already in use",
    ),
    waited(
        "rendezvous_timeout",
        r"/\d+ clients joined",
        *(r"Timed out after \d+ seconds waiting for clients", "Barrier timed out"),
        "initializing process group in store based barrier",
    ),
    waited(
        "rendezvous_timeout",
        *(r"ssh: connect to host \S+ port \d+: ", "ssh exited with exit code 255", "Host key verification failed"),
        "unable to reliably start one or more daemons",
        hint="the launching host must reach every host by ssh without a password or a prompt",
    ),
    # The last number of such a key is a rank.
    waited("rendezvous_timeout", r"wait timeout after \d+ms, keys: /default_pg/\S*/(?P<peer>\d+)(?![\d/])"),
    waited("rendezvous_timeout", r"retr(?:ie|ei)ving ncclUniqueId from \[(?P<peer>\d+)\]"),
    waited(
        "rendezvous_timeout",
        *("client socket has timed out after", "client socket has failed to connect", "RendezvousTimeoutError"),
        *("RendezvousClosedError", "RendezvousConnectionError", "Socket Timeout", "DistStoreError"),
        r"wait timeout after \d+ms",
        "Stop_waiting response is expected",
        "Getting socket times out",
    ),
    failed(
        "rendezvous_timeout",
        *("[Gg]loo connectFullMesh failed", "[Uu]nable to find address for", r"gloo/transport/\S+\] connect \["),
        *("Name or service not known", "Temporary failure in name resolution", "Name does not resolve"),
    ),
)
CONNECTIONS = (
    waited("gloo_connection_reset", r"Timed out waiting \d+ms for (?:recv|send) operation"),
    lost(
        "gloo_connection_reset",
        *("Connection closed by peer", "Connection reset by peer", "Broken pipe"),
        r"gloo/transport/\S+\] (?:Read error|writev) \[",
        "recvBytes",
        "sendBytes failed",
        "DistNetworkError",
        "Application timeout caused pair closure",
        "[Ss]ocket closed",
        "Connection was likely closed",
        "DistBackendError.*(?:store|Socket)",
    ),
)
# torch's packages raise such classes; they count if no signature knows the words of the exception.
CLASSES = (
    ended("other", r"^torch\.[\w.]*\.(?:Child|Process)\w*(?:Error|Exception)$"),
    told("signal_preempted", r"^torch\.distributed\.[\w.]*Signal\w*$"),
    waited("rendezvous_timeout", r"^torch\.distributed\.[\w.]*(?:Rendezvous|Store)\w*$"),
    lost("gloo_connection_reset", r"^torch\.distributed\.[\w.]*Dist\w*Error$"),
)
