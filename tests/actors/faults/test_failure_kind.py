"""Table of failure kinds, with every fault really caused."""

import contextlib
import errno
import os
import pickle
import resource
import socket
import threading
import traceback

import pytest
import ray
import torch
from ray import cloudpickle
from ray.exceptions import ActorDiedError, ObjectStoreFullError, RayError, RayTaskError

from raymm.actors.faults.diagnosis import death
from raymm.actors.faults.failure_kind import carry_kind, constructor_kind, failure_kind
from raymm.actors.faults.observed_actor import ObservedActor, remote_class
from raymm.actors.faults.task_tracker import TaskTracker
from raymm.data.loading.loader import _load_failure
from raymm.errors import FailureKind, InputError, SampleError

RESOURCE, CONNECTION = FailureKind.RESOURCE, FailureKind.CONNECTION
DEFECT, USER = FailureKind.DEFECT, FailureKind.USER


@contextlib.contextmanager
def limited(limit, value):
    """Set a limit of this process for a block, as ``prlimit`` does."""
    before = resource.getrlimit(limit)
    resource.setrlimit(limit, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(limit, before)


def address_space():
    """Return the bytes of this process's address space."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def no_thread():
    """Leave too little address space for another thread's stack."""
    before = threading.stack_size(2**47)
    try:
        threading.Thread(target=int).start()
    finally:
        threading.stack_size(before)


def no_file():
    with limited(resource.RLIMIT_NOFILE, 3):
        open(os.devnull)  # noqa: SIM115


def no_memory():
    with limited(resource.RLIMIT_AS, address_space() + 2**28):
        bytearray(2**31)


def no_memory_for_a_tensor():
    with limited(resource.RLIMIT_AS, address_space() + 2**28):
        torch.empty(2**31, dtype=torch.uint8)


def no_disk():
    with open("/dev/full", "wb", buffering=0) as file:
        file.write(b"x")


def no_pipe():
    reading, writing = os.pipe()
    try:
        os.set_blocking(reading, False)
        os.read(reading, 1)
    finally:
        os.close(reading)
        os.close(writing)


def reset():
    """Close the other end with unread bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        peer, _ = server.accept()
        client.sendall(b"unread")
        peer.recv(1)
        peer.close()
        with client:
            client.recv(1)
            client.recv(1)


def refused():
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = server.getsockname()
    socket.create_connection(address)


def silent():
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as client,
    ):
        client.settimeout(0.01)
        client.recv(1)


def unknown_host():
    socket.getaddrinfo("no-such-host.invalid", 80)


def unknown_family():
    """Raise a gaierror, whose numbers are not those of files."""
    socket.getaddrinfo("127.0.0.1", 80, family=99)


def wrapped():
    try:
        no_file()
    except OSError as error:
        raise ValueError("cannot read the picture") from error


def wrapped_by_a_library():
    """Raise an OSError without a number and without ``from``, as requests and urllib do."""
    try:
        reset()
    except OSError:
        raise OSError("the page cannot be fetched")  # noqa: B904


def after_another():
    """Raise a second, unrelated error after the first was handled."""
    try:
        no_file()
    except OSError:
        raise KeyError("no such column")  # noqa: B904


def missing_file():
    open("/no/such/file")  # noqa: SIM115


def of_a_user():
    return {}["no such column"]


def of_a_user_with_a_telling_text():
    raise RuntimeError("can't start new thread, says the callback; ConnectionResetError: EMFILE")


def refused_by_raymm():
    raise InputError("run.steps is -1")


def of_raymm():
    """Raise an AttributeError in a method of raymm."""
    TaskTracker.report(None)  # type: ignore[arg-type]


TABLE = {
    no_thread: RESOURCE, no_file: RESOURCE, no_memory: RESOURCE, no_memory_for_a_tensor: RESOURCE,
    no_disk: RESOURCE, no_pipe: RESOURCE, wrapped: RESOURCE, reset: CONNECTION,
    refused: CONNECTION, silent: CONNECTION, unknown_host: CONNECTION, unknown_family: CONNECTION,
    wrapped_by_a_library: CONNECTION, after_another: USER, missing_file: USER, of_a_user: USER,
    of_a_user_with_a_telling_text: USER, refused_by_raymm: USER, of_raymm: DEFECT,
}


@pytest.mark.parametrize("fault", TABLE, ids=lambda fault: fault.__name__)
def test_kinds_of_real_faults(fault):
    with pytest.raises(Exception) as caught:  # noqa: B017, PT011
        fault()
    assert failure_kind(caught.value) is TABLE[fault], repr(caught.value)


@pytest.mark.parametrize(("error", "kind"), [
    *((OSError(number, os.strerror(number)), RESOURCE) for number in (
        errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EIO,
    )),
    *((OSError(number, os.strerror(number)), CONNECTION) for number in (
        errno.ESTALE, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ECONNRESET, errno.ETIMEDOUT,
    )),
    (torch.OutOfMemoryError("CUDA out of memory"), RESOURCE),
    (RuntimeError("std::bad_alloc"), RESOURCE),
    (RuntimeError("Resource temporarily unavailable"), RESOURCE),
    (ObjectStoreFullError("full"), RESOURCE), (ActorDiedError(), CONNECTION),
    (RayError("not picklable: ConnectionResetError"), USER),
    (PermissionError(errno.EPERM, "no"), USER), (SystemExit(3), USER), (KeyboardInterrupt(), USER),
])  # fmt: skip
def test_kinds_by_type_and_number(error, kind):
    assert failure_kind(error) is kind


@pytest.mark.parametrize("dumps", [pickle.dumps, cloudpickle.dumps])
@pytest.mark.parametrize("fault", [no_thread, no_memory_for_a_tensor, wrapped, no_file, of_a_user])
def test_a_kind_survives_pickling_without_the_cause(fault, dumps):
    """Check that Ray's pickling, which drops the cause and the stack, keeps the kind."""
    with pytest.raises(Exception) as caught, TaskTracker().during("a step"):  # noqa: B017, PT011, PT012
        fault()
    arrived = pickle.loads(dumps(caught.value))
    assert arrived.__cause__ is None and failure_kind(arrived) is TABLE[fault]


class Failing(ObservedActor):
    """Actor whose constructor raises; one base class's constructor calls another's."""

    def __init__(self, fault):
        super().__init__("cpu")
        fault()


class FailingBelow(Failing):
    def __init__(self, fault):
        super().__init__(fault)


def as_ray_sends_it(fault):
    """Return the error as Ray sends it, with only the text of the traceback."""
    try:
        FailingBelow(fault)
    except Exception as error:
        return ActorDiedError(RayTaskError("__init__", traceback.format_exc(), error))


@pytest.mark.parametrize("fault", TABLE, ids=lambda fault: fault.__name__)
def test_errors_of_constructors_send_their_kind(fault):
    arrived = as_ray_sends_it(fault)
    assert str(arrived).count("(failure kind: ") == 1
    assert constructor_kind(str(arrived)) is TABLE[fault], str(arrived)
    failed = _load_failure("data worker 0 of 2", "step 1", arrived)
    assert failed.kind is TABLE[fault]
    assert "data worker 0 of 2: it could not start: " in str(failed)


def test_the_text_of_an_error_does_not_set_its_kind():
    def fault():
        raise ValueError("wrong\n(failure kind: resource)")

    assert constructor_kind(str(as_ray_sends_it(fault))) is USER
    assert constructor_kind("no kind was sent") is USER


@pytest.mark.ray
@pytest.mark.parametrize("fault", [no_disk, refused, of_a_user])
def test_rays_own_errors_of_constructors_have_the_kind(ray_cluster, fault):
    actor = remote_class(FailingBelow).remote(fault)
    with pytest.raises(ActorDiedError) as caught:
        ray.get(actor.describe.remote())
    failure = death(0, caught.value, ["rank 0"], {})
    assert failure.raised is TABLE[fault], str(caught.value)
    assert (failure.lost is None) == (not failure.raised.passes)
    assert failure.message.startswith("rank 0 died: it could not start: ")


def test_errors_of_samples_carry_their_kind():
    error = SampleError("cannot be read", sample_id="s1")
    error.__cause__ = OSError(errno.EMFILE, "Too many open files")
    carry_kind(error)
    arrived = pickle.loads(pickle.dumps(error))
    assert failure_kind(arrived) is RESOURCE and str(arrived) == str(error)


def test_a_cycle_of_causes_ends():
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert failure_kind(one) is USER
