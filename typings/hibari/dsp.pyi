import numpy as np
import numpy.typing as npt

SR: int
N_FFT: int
HOP: int
WIN: npt.NDArray[np.float32]
WIN_SRC: npt.NDArray[np.float32]

def rfft(x: npt.NDArray[np.float32], axis: int) -> npt.NDArray[np.complex64]: ...
def irfft(x: npt.NDArray[np.complex64], n: int, axis: int) -> npt.NDArray[np.float32]: ...
def ex(x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]: ...
def synth(
    lh: npt.NDArray[np.float32],
    th: npt.NDArray[np.float32],
    ln: npt.NDArray[np.float32],
    lr: npt.NDArray[np.float32],
    phi: npt.NDArray[np.float32],
    f0: npt.NDArray[np.float32],
    rng: np.random.Generator,
) -> npt.NDArray[np.float32]: ...
