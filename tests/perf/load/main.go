// A load generator for what h2load cannot replay: receives and acks, whose handles differ each time,
// and the latency from a send to its receive.
//
//	load receive -address HOST:PORT -topic T -group G -messages N -consumers 16 -batch 32
//	load latency -address HOST:PORT -topic T -group G -messages N
//	load lateness -address HOST:PORT -topic T -group G -messages N -delay 3s -every 20ms
//	load recall -address HOST:PORT -topic T -messages N -delay 8760h
//	load offer -address HOST:PORT -topic T -messages N -every 200us
//
// `lateness` schedules messages and says how late each was received; `recall` sends, schedules and
// recalls in turn, one at a time, and says how long a send and a recall took. `offer` sends at a fixed
// pace, whatever the answers are, and counts the answers by their code.
//
// It prints one line of JSON. `receive` reads of each message no more than its id and handle, and has
// windows that never close: what it costs itself should not be what is measured.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	pb "github.com/apache/rocketmq-clients/golang/v5/protocol/v2"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
)

type options struct {
	address, topic, group string
	messages              int64
	consumers, batch      int
	invisible             time.Duration
	bodyBytes             int
	delay, every          time.Duration
	sinceMs               int64
	headers               []string // names and values in turn
}

func main() {
	if len(os.Args) < 2 {
		fail(fmt.Errorf("usage: load receive|latency|lateness|recall|offer [flags]"))
	}
	var o options
	flags := flag.NewFlagSet(os.Args[1], flag.ExitOnError)
	flags.StringVar(&o.address, "address", "127.0.0.1:8081", "where the proxy listens")
	flags.StringVar(&o.topic, "topic", "bench", "topic")
	flags.StringVar(&o.group, "group", "bench", "consumer group")
	flags.Int64Var(&o.messages, "messages", 100000, "messages to handle")
	flags.IntVar(&o.consumers, "consumers", 16, "receives in flight")
	flags.IntVar(&o.batch, "batch", 32, "messages a receive asks for")
	flags.IntVar(&o.bodyBytes, "body-bytes", 1024, "size of a body")
	flags.DurationVar(&o.delay, "delay", 3*time.Second, "how long a message is delayed")
	flags.DurationVar(&o.every, "every", 20*time.Millisecond, "time between two schedules")
	flags.Int64Var(&o.sinceMs, "since-ms", 0, "Unix time from which a receive is timed; 0: its start")
	flags.DurationVar(&o.invisible, "invisible", time.Minute, "invisible duration")
	flags.Func("header", "NAME=VALUE that each call has too", func(text string) error {
		name, value, found := strings.Cut(text, "=")
		if !found {
			return fmt.Errorf("%q is not NAME=VALUE", text)
		}
		o.headers = append(o.headers, name, value)
		return nil
	})
	_ = flags.Parse(os.Args[2:])
	var result map[string]any
	switch os.Args[1] {
	case "receive":
		result = receive(o)
	case "latency":
		result = latency(o)
	case "lateness":
		result = lateness(o)
	case "recall":
		result = recall(o)
	case "offer":
		result = offer(o)
	default:
		fail(fmt.Errorf("unknown mode %q", os.Args[1]))
	}
	_ = json.NewEncoder(os.Stdout).Encode(result)
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "load:", err)
	os.Exit(1)
}

func dial(o options) pb.MessagingServiceClient {
	return pb.NewMessagingServiceClient(connect(o))
}

func connect(o options, more ...grpc.DialOption) *grpc.ClientConn {
	settings := append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(64 << 20))}, more...)
	connection, err := grpc.NewClient(o.address, settings...)
	if err != nil {
		fail(err)
	}
	return connection
}

func headers(ctx context.Context, o options, id string) context.Context {
	return metadata.AppendToOutgoingContext(metadata.AppendToOutgoingContext(ctx, o.headers...),
		"x-mq-client-id", id, "x-mq-language", "GO", "x-mq-client-version", "5.1.4", "x-mq-protocol", "v2")
}

func receiveRequest(o options, batch int) *pb.ReceiveMessageRequest {
	topic := &pb.Resource{Name: o.topic}
	return &pb.ReceiveMessageRequest{
		Group:              &pb.Resource{Name: o.group},
		MessageQueue:       &pb.MessageQueue{Topic: topic, Id: -1, Broker: &pb.Broker{Name: "broker-0"}},
		FilterExpression:   &pb.FilterExpression{Type: pb.FilterType_TAG, Expression: "*"},
		BatchSize:          int32(batch),
		InvisibleDuration:  durationpb.New(o.invisible),
		LongPollingTimeout: durationpb.New(20 * time.Second),
	}
}

// poll makes one receive and returns its messages. Of a canceled ctx it returns what it has.
func poll(client pb.MessagingServiceClient, ctx context.Context, request *pb.ReceiveMessageRequest) []*pb.Message {
	stream, err := client.ReceiveMessage(ctx, request)
	if ctx.Err() == context.Canceled {
		return nil
	}
	if err != nil {
		fail(err)
	}
	var messages []*pb.Message
	for {
		response, err := stream.Recv()
		if err == io.EOF || ctx.Err() == context.Canceled {
			return messages
		}
		if err != nil {
			fail(err)
		}
		if status := response.GetStatus(); status != nil {
			if code := status.GetCode(); code != pb.Code_OK && code != pb.Code_MESSAGE_NOT_FOUND {
				fail(fmt.Errorf("receive: %v %s", code, status.GetMessage()))
			}
		}
		if message := response.GetMessage(); message != nil {
			messages = append(messages, message)
		}
	}
}

// raw is a codec that leaves messages as they are: both sides are *[]byte.
type raw struct{}

func (raw) Marshal(v any) ([]byte, error)      { return *v.(*[]byte), nil }
func (raw) Unmarshal(data []byte, v any) error { *v.(*[]byte) = data; return nil }
func (raw) Name() string                       { return "proto" }

// Numbers of the fields that are read and written here, as in service.proto and definition.proto.
const (
	responseStatus, responseMessage                  = 1, 2
	statusCode                                       = 1
	messageSystemProperties                          = 3
	propertiesMessageId, propertiesReceiptHandle     = 3, 12
	requestGroup, requestTopic, requestEntries       = 1, 2, 3
	resourceName, entryMessageId, entryReceiptHandle = 2, 1, 2
)

// field returns the bytes of the first field with this number; nil when there is none.
func field(message []byte, wanted protowire.Number) []byte {
	for len(message) > 0 {
		number, kind, n := protowire.ConsumeTag(message)
		if n < 0 {
			fail(fmt.Errorf("the answer is no protobuf"))
		}
		message = message[n:]
		if number == wanted && kind == protowire.BytesType {
			value, _ := protowire.ConsumeBytes(message)
			return value
		}
		n = protowire.ConsumeFieldValue(number, kind, message)
		if n < 0 {
			fail(fmt.Errorf("the answer is no protobuf"))
		}
		message = message[n:]
	}
	return nil
}

func appendField(to []byte, number protowire.Number, value []byte) []byte {
	return protowire.AppendBytes(protowire.AppendTag(to, number, protowire.BytesType), value)
}

// checkStatus fails unless the status of a response is one of the two good ones.
func checkStatus(response []byte, what string) {
	if status := field(response, responseStatus); status != nil {
		_, _, n := protowire.ConsumeTag(status)
		code, _ := protowire.ConsumeVarint(status[n:])
		if c := pb.Code(code); c != pb.Code_OK && c != pb.Code_MESSAGE_NOT_FOUND {
			fail(fmt.Errorf("%s: %v", what, c))
		}
	}
}

// pollEntries makes one receive and returns the entries that ack what came.
func pollEntries(connection *grpc.ClientConn, ctx context.Context, request []byte) ([]byte, int64) {
	description := &grpc.StreamDesc{ServerStreams: true}
	stream, err := connection.NewStream(ctx, description, service+"ReceiveMessage", grpc.ForceCodec(raw{}))
	if err == nil {
		err = stream.SendMsg(&request)
	}
	if err == nil {
		err = stream.CloseSend()
	}
	var entries []byte
	var count int64
	for err == nil {
		var response []byte
		if err = stream.RecvMsg(&response); err != nil {
			break
		}
		checkStatus(response, "receive")
		if message := field(response, responseMessage); message != nil {
			properties := field(message, messageSystemProperties)
			entry := appendField(nil, entryMessageId, field(properties, propertiesMessageId))
			entry = appendField(entry, entryReceiptHandle, field(properties, propertiesReceiptHandle))
			entries = appendField(entries, requestEntries, entry)
			count++
		}
	}
	if err != io.EOF && status.Code(err) != codes.Canceled {
		fail(err)
	}
	return entries, count
}

const service = "/apache.rocketmq.v2.MessagingService/"

func receive(o options) map[string]any {
	var got, acked int64
	var seconds float64
	var ended sync.Once
	var group sync.WaitGroup
	request, err := proto.Marshal(receiveRequest(o, o.batch))
	if err != nil {
		fail(err)
	}
	ackHead := appendField(nil, requestGroup, appendField(nil, resourceName, []byte(o.group)))
	ackHead = appendField(ackHead, requestTopic, appendField(nil, resourceName, []byte(o.topic)))
	began := time.Now()
	if o.sinceMs > 0 {
		began = time.UnixMilli(o.sinceMs)
	}
	// Whoever acks the last message ends the polls of the others, which would wait for more.
	everybody, stop := context.WithTimeout(context.Background(), 10*time.Minute)
	defer stop()
	for worker := 0; worker < o.consumers; worker++ {
		group.Add(1)
		go func(worker int) {
			defer group.Done()
			connection := connect(o, grpc.WithInitialWindowSize(4<<20), grpc.WithInitialConnWindowSize(16<<20))
			ctx := headers(everybody, o, fmt.Sprintf("load-%d", worker))
			for atomic.LoadInt64(&got) < o.messages {
				entries, count := pollEntries(connection, ctx, request)
				if count == 0 {
					return
				}
				atomic.AddInt64(&got, count)
				ack := append(append([]byte(nil), ackHead...), entries...)
				var answer []byte
				if err := connection.Invoke(ctx, service+"AckMessage", &ack, &answer, grpc.ForceCodec(raw{})); err != nil {
					if everybody.Err() != nil {
						return // The others have acked enough meanwhile.
					}
					fail(err)
				}
				checkStatus(answer, "ack")
				if atomic.AddInt64(&acked, count) >= o.messages {
					ended.Do(func() { seconds = time.Since(began).Seconds() })
					stop()
				}
			}
		}(worker)
	}
	group.Wait()
	ended.Do(func() { seconds = time.Since(began).Seconds() })
	var usage syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &usage)
	own := time.Duration(usage.Utime.Nano() + usage.Stime.Nano()).Seconds()
	return map[string]any{"messages": acked, "seconds": seconds, "per_second": float64(acked) / seconds,
		"load_cpu_s_per_million": own / float64(acked) * 1e6}
}

func latency(o options) map[string]any {
	producer, consumer := dial(o), dial(o)
	ctx, cancel := context.WithTimeout(headers(context.Background(), o, "latency"), 10*time.Minute)
	defer cancel()
	arrived := make(chan time.Time)
	go func() {
		request := receiveRequest(o, 1)
		for ctx.Err() == nil {
			for _, message := range poll(consumer, ctx, request) {
				now := time.Now()
				properties := message.GetSystemProperties()
				_, err := consumer.AckMessage(ctx, &pb.AckMessageRequest{
					Group: request.Group, Topic: request.MessageQueue.Topic,
					Entries: []*pb.AckMessageEntry{{MessageId: properties.GetMessageId(), ReceiptHandle: properties.GetReceiptHandle()}}})
				if err != nil {
					return
				}
				arrived <- now
			}
		}
	}()
	spans := make([]float64, 0, o.messages)
	sends := make([]float64, 0, o.messages)
	for n := int64(0); n < o.messages; n++ {
		time.Sleep(10 * time.Millisecond)
		sent := time.Now()
		send(producer, ctx, o, n, time.Time{})
		sends = append(sends, time.Since(sent).Seconds()*1000)
		spans = append(spans, (<-arrived).Sub(sent).Seconds()*1000)
	}
	return map[string]any{
		"send_to_receive_ms": percentiles(spans), "send_ms": percentiles(sends)}
}

// send stores one message, delayed when `due` is set, and returns its recall handle.
func send(producer pb.MessagingServiceClient, ctx context.Context, o options, n int64, due time.Time) string {
	properties := &pb.SystemProperties{
		MessageId:     fmt.Sprintf("01%032X", n),
		MessageType:   pb.MessageType_NORMAL,
		BodyEncoding:  pb.Encoding_IDENTITY,
		BornTimestamp: timestamppb.Now(),
		BornHost:      "bench",
	}
	if !due.IsZero() {
		properties.MessageType = pb.MessageType_DELAY
		properties.DeliveryTimestamp = timestamppb.New(due)
	}
	answer, err := trySend(producer, ctx, o, properties)
	if err != nil || answer.GetStatus().GetCode() != pb.Code_OK {
		fail(fmt.Errorf("send: %v %v", err, answer.GetStatus()))
	}
	return answer.GetEntries()[0].GetRecallHandle()
}

func trySend(producer pb.MessagingServiceClient, ctx context.Context, o options, properties *pb.SystemProperties) (*pb.SendMessageResponse, error) {
	return producer.SendMessage(ctx, &pb.SendMessageRequest{Messages: []*pb.Message{{
		Topic:            &pb.Resource{Name: o.topic},
		Body:             make([]byte, o.bodyBytes),
		SystemProperties: properties}}})
}

// offer starts a send at each tick, also while earlier ones wait for their answers.
func offer(o options) map[string]any {
	producer := dial(o)
	ctx, cancel := context.WithTimeout(headers(context.Background(), o, "offer"), 10*time.Minute)
	defer cancel()
	var group sync.WaitGroup
	var lock sync.Mutex
	codes := map[string]int64{}
	began := time.Now()
	for n := int64(0); n < o.messages; n++ {
		time.Sleep(time.Until(began.Add(time.Duration(n) * o.every)))
		group.Add(1)
		go func() {
			defer group.Done()
			answer, err := trySend(producer, ctx, o, &pb.SystemProperties{
				MessageId:     fmt.Sprintf("02%032X", n),
				MessageType:   pb.MessageType_NORMAL,
				BodyEncoding:  pb.Encoding_IDENTITY,
				BornTimestamp: timestamppb.Now(),
				BornHost:      "bench",
			})
			code := answer.GetStatus().GetCode().String()
			if err != nil {
				code = "gRPC " + status.Code(err).String()
			}
			lock.Lock()
			codes[code]++
			lock.Unlock()
		}()
	}
	group.Wait() // Sends that the client holds back for the server's limit of streams begin later.
	return map[string]any{"seconds": time.Since(began).Seconds(), "answers": codes}
}

func lateness(o options) map[string]any {
	producer, consumer := dial(o), dial(o)
	ctx, cancel := context.WithTimeout(headers(context.Background(), o, "lateness"), 10*time.Minute)
	defer cancel()
	done := make(chan []float64)
	go func() {
		request := receiveRequest(o, 32)
		var late []float64
		for int64(len(late)) < o.messages {
			messages := poll(consumer, ctx, request)
			now := time.Now()
			ack := &pb.AckMessageRequest{Group: request.Group, Topic: request.MessageQueue.Topic}
			for _, message := range messages {
				properties := message.GetSystemProperties()
				late = append(late, now.Sub(properties.GetDeliveryTimestamp().AsTime()).Seconds()*1000)
				ack.Entries = append(ack.Entries, &pb.AckMessageEntry{
					MessageId: properties.GetMessageId(), ReceiptHandle: properties.GetReceiptHandle()})
			}
			if len(messages) > 0 {
				if _, err := consumer.AckMessage(ctx, ack); err != nil {
					fail(err)
				}
			}
		}
		done <- late
	}()
	for n := int64(0); n < o.messages; n++ {
		send(producer, ctx, o, n, time.Now().Add(o.delay).Truncate(time.Millisecond))
		time.Sleep(o.every)
	}
	late := <-done
	early := 0
	for _, each := range late {
		if each < 0 {
			early++
		}
	}
	return map[string]any{"lateness_ms": percentiles(late), "early": early}
}

func recall(o options) map[string]any {
	client := dial(o)
	ctx, cancel := context.WithTimeout(headers(context.Background(), o, "recall"), 10*time.Minute)
	defer cancel()
	var sends, schedules, recalls []float64
	for n := int64(0); n < o.messages; n++ {
		began := time.Now()
		send(client, ctx, o, 3*n, time.Time{})
		sent := time.Now()
		handle := send(client, ctx, o, 3*n+1, time.Now().Add(o.delay))
		scheduled := time.Now()
		answer, err := client.RecallMessage(ctx, &pb.RecallMessageRequest{
			Topic: &pb.Resource{Name: o.topic}, RecallHandle: handle})
		if err != nil || answer.GetStatus().GetCode() != pb.Code_OK {
			fail(fmt.Errorf("recall: %v %v", err, answer.GetStatus()))
		}
		recalled := time.Now()
		sends = append(sends, sent.Sub(began).Seconds()*1000)
		schedules = append(schedules, scheduled.Sub(sent).Seconds()*1000)
		recalls = append(recalls, recalled.Sub(scheduled).Seconds()*1000)
	}
	return map[string]any{"send_ms": percentiles(sends), "schedule_ms": percentiles(schedules),
		"recall_ms": percentiles(recalls)}
}

func percentiles(values []float64) map[string]float64 {
	sort.Float64s(values)
	at := func(part float64) float64 { return values[int(part*float64(len(values)-1))] }
	return map[string]float64{"p50": at(0.5), "p99": at(0.99), "max": at(1)}
}
