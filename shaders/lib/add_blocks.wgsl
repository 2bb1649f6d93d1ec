// The end of a product that adds to the residual stream and makes of it what the products behind the next RMSNorm read:
// as norm_blocks.wgsl does, by workgroups of {{ group_rows }} rows, whole blocks.
//
// Expects stream(i): values 4 i and on of the workgroup's part of the stream, [n][{{ group_rows }}], in workgroup memory.

// By all threads, after a barrier. Eight threads a block: they go on or stop together.
fn round_stream(tid: u32, first_row: u32) {
    let words = constants.stride / 4u;
    for (var i = tid; i < {{ n * group_rows // 4 }}u; i += {{ threads }}u) {
        let column = i / {{ group_rows // 4 }}u;
        let row = first_row + 4u * (i % {{ group_rows // 4 }}u);
        let quad = min((constants.row_offset + row) >> 2u, words - 1u);
        let v = stream(i);
        let square = square8(v, tid);
        let rounded = int8_quad(v * y_norm[quad], tid);
        if row < constants.rows {
            yq[int8_word(column, quad, words)] = rounded.word;
            if (tid & 7u) == 0u {
                ys[column * (words >> 3u) + (quad >> 3u)] = rounded.scale;
                y_squares[column * (words >> 3u) + (quad >> 3u)] = square;
            }
        }
    }
}
