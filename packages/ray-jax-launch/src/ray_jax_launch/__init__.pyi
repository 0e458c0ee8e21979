"""Public names of ray_jax_launch, by module. `__init__.py` loads each name on first use."""

from ._checkpoint.catalog import intact_step as intact_step
from ._checkpoint.catalog import latest_step as latest_step
from ._checkpoint.catalog import newest_metadata as newest_metadata
from ._checkpoint.checkpoints import Checkpoints as Checkpoints
from ._checkpoint.checkpoints import Restored as Restored
from ._cluster import auto as auto
from ._cluster import check_resources as check_resources
from ._cluster import connect as connect
from ._cluster import dashboard_url as dashboard_url
from ._errors import DamagedCheckpointError as DamagedCheckpointError
from ._errors import DeletedCheckpointError as DeletedCheckpointError
from ._errors import LaunchError as LaunchError
from ._errors import MismatchedCheckpointError as MismatchedCheckpointError
from ._errors import OutOfMemoryError as OutOfMemoryError
from ._errors import PermanentError as PermanentError
from ._errors import StorageFullError as StorageFullError
from ._errors import TrainingFailed as TrainingFailed
from ._errors import UnsavedCheckpointError as UnsavedCheckpointError
from ._hardware import Hardware as Hardware
from ._hardware import cpu as cpu
from ._hardware import gpu as gpu
from ._hardware import local as local
from ._hardware import parse_hardware as parse_hardware
from ._hardware import tpu as tpu
from ._scaling import scaling_config as scaling_config
from ._storage import StoragePath as StoragePath
from ._storage import as_storage_path as as_storage_path
from ._storage import check_run_name as check_run_name
from ._storage import is_uri as is_uri
from ._storage import join_path as join_path
from ._storage import open_uri as open_uri
from ._train.backend import DistributedConfig as DistributedConfig
from ._train.backend import backend_config as backend_config
from ._train.backend import worker_environment as worker_environment
from ._train.datasets import RankedDataConfig as RankedDataConfig
from ._train.datasets import RankedDataset as RankedDataset
from ._train.fit_result import Result as Result
from ._train.fit_result import SavedCheckpoint as SavedCheckpoint
from ._train.launch import launch as launch
from ._train.trainer import JaxTrainer as JaxTrainer
from ._train.worker_context import log_metrics as log_metrics
from ._train.worker_context import log_to_driver as log_to_driver
from ._train.worker_context import mark_finished as mark_finished
from ._train.worker_context import stop_requested as stop_requested

__version__: str
