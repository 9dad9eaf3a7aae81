#include "decode.cuh"
