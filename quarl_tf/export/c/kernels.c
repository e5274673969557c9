/* A window that slides over rows of channels; of a dense layer it is a whole vector. */
struct layer {
    const int8_t *kernel;
    const int32_t *bias, *multiplier; /* the input's zero point is in the bias */
    const int8_t *shift;              /* an output's scale is multiplier / 2^shift */
    int32_t row, height, span;        /* numbers in a row; rows of the window, numbers in each */
    int32_t down, right;              /* numbers from one window to the next */
    int32_t rows, columns, outputs;
    int32_t step, twice;              /* 1: a scale for each output; 1: round twice */
    int32_t zero, lowest;             /* codes of outputs: that of 0, and the least */
};

/* Halves away from zero; as in LiteRT's reference kernels, CONV_2D rounds to 32 bits first. */
static int32_t rescale(int32_t sum, int32_t multiplier, int32_t shift, int32_t twice)
{
    const int32_t left = twice && shift < 31 ? 31 - shift : 0;
    int64_t value = (int64_t)sum * multiplier * ((int64_t)1 << left);
    if (twice) {
        value = (value + ((int64_t)1 << 30)) >> 31;
        shift += left - 31;
    }
    return (int32_t)((value + (((int64_t)1 << shift) >> 1) - (value < 0 && shift > 0)) >> shift);
}

static void layer_$type(const $type *in, int8_t *out, const struct layer *layer)
{
    for (int32_t window = 0; window < layer->rows * layer->columns; window++) {
        const $type *corner = in + window / layer->columns * layer->down
                              + window % layer->columns * layer->right;
        const int8_t *kernel = layer->kernel;
        for (int32_t c = 0; c < layer->outputs; c++) {
            const int32_t k = c * layer->step;
            int32_t sum = layer->bias[c];
            for (int32_t y = 0; y < layer->height; y++)
                for (int32_t i = 0; i < layer->span; i++)
                    sum += (int32_t)*kernel++ * corner[y * layer->row + i];
            sum = rescale(sum, layer->multiplier[k], layer->shift[k], layer->twice) + layer->zero;
            sum = sum < layer->lowest ? layer->lowest : sum;
            *out++ = (int8_t)(sum > 127 ? 127 : sum);
        }
    }
}

static int32_t within(int32_t x, int32_t low, int32_t high)
{
    return x < low ? low : x > high ? high : x;
}

/* Codes of a dense layer and, behind them, of the remainders of its sums. A code is `units` of a
   sum; a remainder is scaled by multiplier / 2^shift. */
static void two_stages_$type(const $type *in, int8_t *out, const struct layer *layer,
                             const int32_t *units, const int32_t *multiplier, const int8_t *shift)
{
    const int8_t *kernel = layer->kernel;
    for (int32_t c = 0; c < layer->outputs; c++) {
        const int32_t k = c * layer->step;
        int32_t sum = layer->bias[c];
        for (int32_t i = 0; i < layer->span; i++)
            sum += (int32_t)*kernel++ * in[i];
        const int32_t code = rescale(sum, layer->multiplier[k], layer->shift[k], 0);
        out[c] = (int8_t)within(code + layer->zero, -128, 127);
        sum = rescale(sum - units[c] * (out[c] - layer->zero), multiplier[c], shift[c], 0);
        out[layer->outputs + c] = (int8_t)within(sum, -128, 127);
    }
}

/* Round to the nearest code, halves away from zero; NaN becomes the lowest. */
static int8_t quantize(float value, float scale, int32_t zero)
{
    const float steps = value / scale, low = (float)(-128 - zero), high = (float)(127 - zero);
    const float kept = steps > low ? steps < high ? steps : high : low;
    const int32_t whole = (int32_t)kept;
    const float rest = kept - (float)whole;
    return (int8_t)(whole + (rest >= 0.5f) - (rest <= -0.5f) + zero);
}

/* A dense layer that was left in float; `lowest` is ReLU's cut. */
static void float_layer(const float *in, float *out, const float *kernel, const float *bias,
                        int32_t inputs, int32_t outputs, float lowest)
{
    for (int32_t c = 0; c < outputs; c++) {
        float sum = 0.0f;
        for (int32_t i = 0; i < inputs; i++)
            sum += in[i] * *kernel++;
        out[c] = sum + bias[c] < lowest ? lowest : sum + bias[c];
    }
}

/* (x multiplier + more) / 2^shift, to the nearest. */
static int32_t line(int32_t x, int32_t multiplier, int32_t shift, int64_t more)
{
    return (int32_t)(((int64_t)x * multiplier + more + ((int64_t)1 << shift >> 1)) >> shift);
}
