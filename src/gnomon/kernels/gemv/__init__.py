"""The matrix-vector product that every weight format of `gnomon.kernels` shares on a GPU."""
