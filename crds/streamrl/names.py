"""Names on Kubernetes: objects of a job, labels, ports, directories. The one place where operator, images and tools agree.

Names of pods, labels and addresses follow from job and pool alone, so each part finds the others without asking.
"""

from streamrl import API_GROUP

LABEL_JOB = f"{API_GROUP}/job"
"""Name of the RLJob; on every object of the job."""
LABEL_ROLE = f"{API_GROUP}/role"
"""`trainer` (with the scheduler in its pod), `trainer-worker` (further nodes of ranks), `generator` or `agents`; on pods."""
LABEL_POOL = f"{API_GROUP}/pool"
"""Name of the pool; on all that belongs to one."""
LABEL_JOB_UID = f"{API_GROUP}/job-uid"
"""UID of the RLJob, for what has no owner reference to it."""
LABEL_NAME, LABEL_INSTANCE, LABEL_MANAGED_BY = (
    "app.kubernetes.io/name",
    "app.kubernetes.io/instance",
    "app.kubernetes.io/managed-by",
)
MANAGED_BY = "streamrl-operator"

ANNOTATION_SPEC_HASH = f"{API_GROUP}/spec-hash"
"""Hash of what we applied last, to compare with before a write."""
ANNOTATION_ATTEMPT = f"{API_GROUP}/restarted-at"
"""On the trainer's pod template: changes when the trainer's pods are to be made again."""
ANNOTATION_KEEP_CHECKPOINTS = f"{API_GROUP}/keep-checkpoints"
"""On an RLJob, `true`: the claim of its checkpoints outlives it, whatever `storage` says. `streamrl cancel` sets it."""
ANNOTATION_PLACEMENT = f"{API_GROUP}/placement"
"""On a StatefulSet: what the job's admission by Kueue adds to its pods, as it was when the quota was reserved."""
ANNOTATION_ABANDON = f"{API_GROUP}/abandon"
"""On an RLJob: names of member clusters, separated by commas, for which its deletion does not wait any more. Written by people."""
FINALIZER = f"{API_GROUP}/cleanup"
GATE = f"{API_GROUP}/rejected"
"""Scheduling gate of a StatefulSet's new pods after kubelets rejected some of its pods. Written by the operator into the template; it deletes the gated pods later."""

LABEL_CLUSTER = f"{API_GROUP}/cluster"
"""Name of the RLCluster, on every object in a member; at home on nothing."""
LABEL_ORIGIN = f"{API_GROUP}/origin"
"""UID of the home cluster, on every object in a member."""
LABEL_HUB_NAMESPACE = f"{API_GROUP}/hub-namespace"
"""Namespace of the RLJob at home, on every object in a member."""

LABEL_QUEUE = "kueue.x-k8s.io/queue-name"
"""On an RLJob: the LocalQueue of Kueue that its pods wait in. Written by the user, read by the operator."""
LABEL_QUEUE_PRIORITY = "kueue.x-k8s.io/priority-class"
"""On an RLJob: its WorkloadPriorityClass. Written by the user, read by the operator."""

FIELD_MANAGER = "streamrl-operator"
REPLICAS_MANAGER = "streamrl-replicas"
"""Owns `spec.replicas` of GeneratorPools, alone."""

PORT_GRPC, PORT_SIGNALS, PORT_WEIGHTS, PORT_TRAINER_SIGNALS = 50051, 8080, 50052, 8081
"""Scheduler's gRPC and signals; trainer's server of weights and signals. A generator's signals port is PORT_SIGNALS too."""
PORT_NAME_GRPC, PORT_NAME_SIGNALS, PORT_NAME_WEIGHTS = "grpc", "signals", "weights"
PORT_NAME_TRAINER_SIGNALS = "trainer-signals"
PORT_RANK_SIGNALS = PORT_TRAINER_SIGNALS + 1
"""Signals of a node's second rank, one more for each further one; their ports are called `rank-signals-<n>`."""
PORT_RANK_WEIGHTS = 50054
"""Weights that a node's second rank serves, one more for each further one, called `rank-weights-<n>`; a further node's first rank has PORT_WEIGHTS."""
PORT_RANKS = 50053
"""Rendezvous of the trainer's ranks, where there are several nodes; the collectives that follow choose their own ports."""

DIR_JOB = "/etc/streamrl/job"
"""ConfigMap of the resolved job: `job.json`."""
DIR_TLS = "/etc/streamrl/tls"
"""Secret of the role's leaf: ca.crt, tls.crt, tls.key."""
DIR_CODE = "/etc/streamrl/code"
"""The user's modules (`task.code`)."""
DIR_RUN = "/var/lib/streamrl/run"
"""The journal's volume (trainer's pod), or scratch space (generators)."""
DIR_STORE_VOLUME = "/var/lib/streamrl/store"
"""The checkpoints' volume; the job's own directory in it is `store_dir`."""
DIR_SHARED = "/var/lib/streamrl/shared"
"""Scratch space shared by the containers of the trainer's pod."""

DIR_TASKS = "/var/lib/streamrl/tasks"
"""Scratch space of scheduler and tasks, or of an agent host and its link: the socket by which they speak."""

CONTAINER_SCHEDULER, CONTAINER_PREPARE, CONTAINER_TASKS, CONTAINER_TRAINER, CONTAINER_GENERATOR = (
    "scheduler",
    "prepare",
    "tasks",
    "trainer",
    "generator",
)
CONTAINER_AGENTS, CONTAINER_AGENT_LINK = "agents", "agent-link"
"""Of a pod of agents: the one with the programs, and the one with the job's certificate."""
OWN_CONTAINERS = (
    *(CONTAINER_SCHEDULER, CONTAINER_PREPARE, CONTAINER_TASKS, CONTAINER_TRAINER, CONTAINER_GENERATOR),
    *(CONTAINER_AGENTS, CONTAINER_AGENT_LINK),
)
AGENTS = "agents"
"""Name of the pool of agents, its role, and how its processes begin."""


MOST_SET_CHARACTERS = 52
"""Of a StatefulSet's name: its pods have a label of 63 characters at most, the name with a dash and a hash of 10."""
MOST_JOB_CHARACTERS = MOST_SET_CHARACTERS - len("-trainer-workers")
MOST_POOL_CHARACTERS = MOST_SET_CHARACTERS - len("j-")
"""With the shortest name of a job; the two together have one less than a StatefulSet, for the dash."""
OWN_SUFFIXES = ("trainer", "trainer-workers", "scheduler", "exposed")
"""Which no pool is called: the job's own objects are."""


def trainer(job: str) -> str:
    """StatefulSet of the trainer, and the headless Service of its pods."""
    return f"{job}-trainer"


def trainer_workers(job: str) -> str:
    """StatefulSet of the trainer's further nodes, the headless Service of their pods, and their NetworkPolicy."""
    return f"{job}-trainer-workers"


def scheduler(job: str) -> str:
    """Service of the scheduler's ports and of the trainer's server of weights."""
    return f"{job}-scheduler"


def pool(job: str, pool_name: str) -> str:
    """GeneratorPool, its StatefulSet, headless Service, PodDisruptionBudget and NetworkPolicy."""
    return f"{job}-{pool_name}"


def resolved(job: str) -> str:
    """ConfigMap with the resolved job."""
    return f"{job}-job"


def service_account(job: str) -> str:
    """ServiceAccount of all pods of the job; it has no access to the API."""
    return f"{job}-pods"


def ca_secret(job: str) -> str:
    """Secret with the job's certificate authority; mounted nowhere."""
    return f"{job}-ca"


def tls_secret(job: str, role: str) -> str:
    """Secret with a role's leaf (`scheduler`, `trainer`, `generator`, `generator/<cluster>`, `agents`)."""
    return f"{job}-tls-{role.replace('/', '-')}"


def journal_claim(job: str) -> str:
    """Claim of the journal's volume."""
    return f"{job}-journal"


def checkpoints_claim(job: str) -> str:
    """Claim of the checkpoints' volume, where the job names none."""
    return f"{job}-checkpoints"


def workload(job: str, *, pool: str = "", number: int = 0) -> str:
    """Kueue's Workload of the job, or of a pool's replica beyond those: its number counts from 0."""
    return f"rljob-{job}.{pool}.{number}" if pool else f"rljob-{job}"


HOME = "home"
"""What generators at home call their cluster where the trainer is in a member."""


def anchor(job: str) -> str:
    """ConfigMap in a member cluster that owns all that the job has there."""
    return f"{job}-anchor"


def code(job: str) -> str:
    """ConfigMap with the user's modules: as `streamrl submit` makes it at home, and as it is copied to a member."""
    return f"{job}-code"


def exposed(job: str) -> str:
    """Service at home by which generators in members reach the job."""
    return f"{job}-exposed"


def generator_role(cluster: str) -> str:
    """Role of the leaf that generators in a member show."""
    return f"generator/{cluster}"


def tls_name(service: str, *, uid: str) -> str:
    """Name in the leaf of `scheduler` or `weights` of the job with this UID: what generators in members demand, and send as SNI."""
    return f"{service}.{uid[:8]}.streamrl.internal"


def store_dir(job: str, *, uid: str) -> str:
    """Directory of the job's checkpoints and model, on the checkpoints' volume as it is mounted.

    It has the beginning of the job's UID: a job with the name of an earlier one has another journal, so the earlier one's
    checkpoints are not its own.
    """
    return f"{DIR_STORE_VOLUME}/{store_name(job, uid=uid)}"


def store_name(job: str, *, uid: str) -> str:
    """Name of that directory, from the volume's root: whoever mounts the volume elsewhere finds it by this."""
    return f"{job}-{uid[:8]}"


def role_uri(namespace: str, job: str, role: str) -> str:
    """URI in a leaf's subject alternative names that says who its holder is."""
    return f"streamrl://{namespace}/{job}/{role}"
